# SPDX-License-Identifier: Apache-2.0
"""A socket that does not block: its options, and waits for it with a deadline on the monotonic clock."""

from __future__ import annotations

import math
import select
import socket
import ssl
import time


def set_options(sock: socket.socket) -> None:
    """Non-blocking, without delay of small frames, and with keepalive."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # the names differ between systems
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def milliseconds(deadline: float | None) -> float | None:
    """Milliseconds until `deadline` for a poll, rounded up and never negative; None for no limit."""
    if deadline is None or deadline == math.inf:
        return None
    return math.ceil(max(0.0, min(deadline - time.monotonic(), 1e6)) * 1000)


def ready(sock: socket.socket, error: OSError, events: int, deadline: float | None) -> bool:
    """Whether, before the deadline, the call that ended with `error` can continue."""
    if isinstance(error, ssl.SSLWantReadError):
        events = select.POLLIN
    elif isinstance(error, ssl.SSLWantWriteError):
        events = select.POLLOUT
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(milliseconds(deadline)))
