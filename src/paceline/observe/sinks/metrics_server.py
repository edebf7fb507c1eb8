# SPDX-License-Identifier: Apache-2.0
"""An HTTP server for one page, with a limit on connections and a deadline for each request.

The server of prometheus_client has neither: a client that sends a byte now and then holds one of its threads for ever.
"""

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

WHOLE_S = 10.0
"""Seconds that a client has for its whole request and for taking the answer, however little it sends at a time."""
CLIENTS = 32
"""Connections at a time; for one more the server closes the oldest of the host that has most."""


class MetricsServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    """Serves a page to scrapers, whatever other clients do.

    Args:
        address: host and port.
        page: makes the page, and names its content type.
    """

    def __init__(self, address: tuple[str, int], page: Callable[[], tuple[bytes, str]]) -> None:
        self._clients: dict[Any, tuple[str, float]] = {}  # connection -> of which host, and until when
        self._changing = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _handler(page))

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


def _handler(page: Callable[[], tuple[bytes, str]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = WHOLE_S

        def do_GET(self) -> None:
            """`/metrics`, and nothing else."""
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body, kind = page()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *about: Any) -> None:
            """A scrape every few seconds is no news."""

    return Handler
