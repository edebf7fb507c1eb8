# SPDX-License-Identifier: Apache-2.0
"""An HTTP server with a limit on connections and a deadline for each request, whatever its clients do.

The servers of the standard library and of prometheus_client have neither: a client that sends a byte now and then holds
a thread for ever.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple

from paceline.communication.sockets.rejected import neighbourhood

REQUEST_TIMEOUT_S = 10.0
"""For the whole request and the response, however little a client sends at a time."""
MAX_CONNECTIONS = 32
"""For one more the server closes the oldest connection of the host that has most."""


class Answer(NamedTuple):
    """What a request gets."""

    status: int
    kind: str = "text/plain; charset=utf-8"
    body: bytes = b""
    headers: Mapping[str, str] = {}


class BoundedServer(ThreadingHTTPServer):
    """Answers GET requests; `answer`, of a path and the headers, is called in a thread of each request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], answer: Callable[[str, Message], Answer]) -> None:
        self._clients: dict[Any, tuple[str, float]] = {}  # connection -> its host, its deadline
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _handler(answer))

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread of its own; make room for it first."""
        with self._lock:
            if len(self._clients) >= MAX_CONNECTIONS:
                self._disconnect(self._to_disconnect())
            self._clients[request] = (neighbourhood(str(client_address[0])), time.monotonic() + REQUEST_TIMEOUT_S)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Disconnect clients whose deadline has passed; called twice a second."""
        with self._lock:
            for request in [request for request, (_, until) in self._clients.items() if time.monotonic() > until]:
                self._disconnect(request)

    def _to_disconnect(self) -> Any:
        """The oldest connection of the host that has most."""
        most = Counter(where for where, _ in self._clients.values()).most_common(1)[0][0]
        return next(request for request, (where, _) in self._clients.items() if where == most)

    def _disconnect(self, request: Any) -> None:
        """Close a connection under its thread."""
        del self._clients[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect early."""


def _handler(answer: Callable[[str, Message], Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S
        server_version, sys_version = "paceline", ""

        def do_GET(self) -> None:
            page = answer(self.path, self.headers)
            self.send_response(page.status)
            for name, value in {"Content-Type": page.kind, "Content-Length": len(page.body), **page.headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(page.body)

        def log_message(self, *about: Any) -> None:
            """Do not log requests."""

    return Handler
