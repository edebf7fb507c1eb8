# SPDX-License-Identifier: Apache-2.0
"""The numbers of one worker over HTTP, at `/metrics`, for Prometheus to scrape."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from paceline.communication.sockets.rejected import neighbourhood
from paceline.core.world import World
from paceline.errors import UnsupportedError
from paceline.observe.sinks.base import Values
from paceline.observe.sinks.exposition import CONTENT_TYPE, text

WHOLE_S = 10.0
"""Seconds that a client has for its whole request and for taking the answer, however little it sends at a time."""
CLIENTS = 32
"""Connections at a time; for another one the oldest is cut off of the host that has most."""


class Metrics:
    """Serves what it was told last.

    Args:
        address: HOST:PORT to listen on; worker k of its host takes PORT + k, and port 0 is any that is free.
        world: where this worker stands at present: rank and host are labels.

    Attributes:
        address: where it listens, as HOST:PORT.

    Raises:
        UnsupportedError: the address is none, or cannot be had.
    """

    def __init__(self, address: str, world: Callable[[], World]) -> None:
        self._world, self._lock, self._values = world, threading.Lock(), dict[str, float]()
        host, port = split(address)
        if port:
            port += world().local_rank
        try:
            self._server = _Server((host, port), _handler(self.page))
        except (OSError, OverflowError) as error:
            raise UnsupportedError(
                world().sign(f"cannot serve metrics at {host}:{port}: {error}; choose another address or port")
            ) from error
        self.address = f"{address.rpartition(':')[0]}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="paceline-metrics", daemon=True)
        self._thread.start()

    def take(self, values: Values, step: int) -> None:
        """Keep the values for the next scrape."""
        with self._lock:
            self._values |= values

    def page(self) -> str:
        """What a scrape gets."""
        with self._lock:
            values = dict(self._values)
        world = self._world()
        return text(values, {"rank": str(world.rank), "host": world.host})

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def split(address: str) -> tuple[str, int]:
    """HOST and PORT of "HOST:PORT", "[::1]:PORT" for version 6; `UnsupportedError` where it is none."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise UnsupportedError(
            f"metrics are served at HOST:PORT, such as 127.0.0.1:9400 (0.0.0.0 for all interfaces), got {address!r}"
        )
    return host.strip("[]"), int(port)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._clients: dict[Any, tuple[str, float]] = {}  # connection -> of which host, and until when
        self._changing = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind, without looking up the name of the host, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread of its own, of which there are not too many."""
        with self._changing:
            if len(self._clients) >= CLIENTS:
                self._cut_off(self._most_crowded())
            self._clients[request] = (neighbourhood(str(client_address[0])), time.monotonic() + WHOLE_S)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A client was served, or has left."""
        with self._changing:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off who takes too long; called twice a second."""
        with self._changing:
            for request in [request for request, (_, until) in self._clients.items() if time.monotonic() > until]:
                self._cut_off(request)

    def _most_crowded(self) -> Any:
        """The oldest connection of where most come from."""
        most = Counter(where for where, _ in self._clients.values()).most_common(1)[0][0]
        return next(request for request, (where, _) in self._clients.items() if where == most)

    def _cut_off(self, request: Any) -> None:
        """Its thread finds the connection closed."""
        del self._clients[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no news."""


def _handler(page: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = WHOLE_S

        def do_GET(self) -> None:
            """`/metrics`, and nothing else."""
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = page().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *about: Any) -> None:
            """A scrape every few seconds is no news."""

    return Handler
