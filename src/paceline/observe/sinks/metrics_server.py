# SPDX-License-Identifier: Apache-2.0
"""An HTTP server for one page, with a limit on connections and a deadline for each request.

The server of prometheus_client has neither: a client that sends a byte now and then holds a thread for ever.
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

REQUEST_TIMEOUT_S = 10.0
"""For the whole request and the response, however little a client sends at a time."""
MAX_CONNECTIONS = 32
"""For one more the server closes the oldest connection of the host that has most."""


class MetricsServer(ThreadingHTTPServer):
    """Serves a page to scrapers, whatever other clients do.

    Args:
        address: host and port.
        page: makes the page, and names its content type.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], page: Callable[[], tuple[bytes, str]]) -> None:
        self._clients: dict[Any, tuple[str, float]] = {}  # connection -> its host, its deadline
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _handler(page))

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


def _handler(page: Callable[[], tuple[bytes, str]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            """Serve `/metrics` only."""
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
            """Do not log scrapes."""

    return Handler
