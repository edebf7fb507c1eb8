# SPDX-License-Identifier: Apache-2.0
"""A web server that injects faults.

Each path has a body and a list of faults; each request takes the next fault off the list:

- a number such as 503: answers so, without a body;
- "cut": closes the connection in the middle of the body; "short" announces fewer bytes and sends them;
- "flip": one bit of the body is wrong, under the right Content-MD5;
- "unsized": no Content-Length;
- "hold": sends half, then waits for `resume`; "late" waits before it answers.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


class Server:
    """Serves `bodies` at http://127.0.0.1:port while it is open."""

    def __init__(self, bodies: dict[str, bytes] | None = None, *, checksums: bool = True) -> None:
        self.bodies, self.checksums = dict(bodies or {}), checksums
        self.faults: dict[str, list[str | int]] = {}
        self.requests: Counter[str] = Counter()
        self.arrivals: list[str] = []
        self.half, self.resume = threading.Semaphore(0), threading.Event()
        self.changed = threading.Condition()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            request_queue_size = 64

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that was killed is part of the test."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def url(self, path: str) -> str:
        return f"{self.address}/{path}"

    def put(self, path: str, body: bytes) -> str:
        self.bodies[path] = body
        return self.url(path)

    def fail(self, path: str, *faults: str | int) -> None:
        self.faults[path] = list(faults)

    def wait_for(self, path: str, requests: int = 1) -> None:
        """Until so many requests for a path have come."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.requests[path] >= requests, 60), f"no request for {path}"

    def wait_half(self) -> None:
        """Until a client has received half of a held file."""
        assert self.half.acquire(timeout=60), "no request for a held file"

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.lstrip("/").partition("?")[0]
        with self.changed:
            self.requests[path] += 1
            self.arrivals.append(path)
            faults = self.faults.get(path, [])
            fault = faults.pop(0) if faults else None
            self.changed.notify_all()
        if path not in self.bodies and fault is None:
            fault = 404
        if isinstance(fault, int):
            handler.send_error(fault)
            return
        if fault == "late":
            assert self.resume.wait(60)
        self._send(handler, self.bodies[path], fault)

    def _send(self, handler: BaseHTTPRequestHandler, body: bytes, fault: str | None) -> None:
        handler.send_response(200)
        if self.checksums:
            handler.send_header("Content-MD5", base64.b64encode(hashlib.md5(body).digest()).decode())
        half = len(body) // 2
        if fault == "flip":
            body = body[:half] + bytes([body[half] ^ 1]) + body[half + 1 :]
        if fault == "short":
            body = body[:half]
        if fault != "unsized":
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[:half])
        if fault == "hold":
            handler.wfile.flush()
            self.half.release()
            assert self.resume.wait(60)
        if fault != "cut":
            handler.wfile.write(body[half:])

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
