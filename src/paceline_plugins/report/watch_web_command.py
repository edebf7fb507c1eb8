# SPDX-License-Identifier: Apache-2.0
"""`paceline watch --web`: the page of a run, served to a browser while the run trains."""

from __future__ import annotations

import ipaddress
import secrets
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.console import out, refuse
from paceline.cli.run.status import describe
from paceline.cli.watch import state
from paceline.observe.reports.live import Live

if TYPE_CHECKING:
    from paceline.observe.http_server import BoundedServer
    from paceline_plugins.report.live_page import LivePage, Status

PORT = 8765


def serve(directory: Path, host: str, port: int | None) -> None:
    """Serve the page until Ctrl-C."""
    from paceline_plugins.report.live_page import LivePage  # NumPy is slow to import

    token = "" if _is_local(host) else secrets.token_urlsafe(16)
    live = Live(directory)
    page = LivePage(directory, lambda: status_of(live), token)
    server = _listen(host, port, page)
    thread = threading.Thread(target=server.serve_forever, name="paceline-page", daemon=True)
    thread.start()
    for line in addresses(host, server.server_port, token):
        out().print(line, soft_wrap=True, markup=False)
    stop = threading.Event()
    former = signal.signal(signal.SIGINT, lambda *_: stop.set())  # an exception could be lost while a chart is drawn
    try:
        while not stop.wait(page.refresh()):
            pass
    finally:
        signal.signal(signal.SIGINT, former)
        server.shutdown()
        server.server_close()


def status_of(live: Live) -> Status:
    """What the run does now, as the terminal shows it."""
    from paceline_plugins.report.live_page import Status

    shot, now = live.poll(), time.time()
    states = {log.rank: state(log.rank, log, shot, now) for log in live.workers}
    over, text = live.over, describe(shot, shot.size).plain
    return Status(f"The run is over. {text}" if over else text, over, states)


def addresses(host: str, port: int, token: str) -> list[str]:
    """What to open, and how from elsewhere."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    query = f"?token={token}" if token else ""
    lines = [f"page: http://{f'[{name}]' if ':' in name else name}:{port}/{query} (Ctrl-C ends it)"]
    if token:
        return [*lines, "It is not encrypted: on a network that you do not trust, leave out --host and use ssh -L."]
    tunnel = f"ssh -L {port}:localhost:{port} {socket.gethostname()}"
    return [*lines, f"From another machine: {tunnel}, and there open http://localhost:{port}/"]


def _listen(host: str, port: int | None, page: LivePage) -> BoundedServer:
    """A server at the wanted port; without a wish at `PORT`, or at any that is free."""
    from paceline.observe.http_server import BoundedServer  # loads an HTTP server

    for wanted in [PORT, 0] if port is None else [port]:
        try:
            return BoundedServer((host, wanted), page.answer)
        except OSError as error:
            problem = error
    refuse(f"cannot serve the page at {host}, port {wanted}: {problem}; choose another --port or --host")


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
