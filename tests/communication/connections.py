# SPDX-License-Identifier: Apache-2.0
"""Connections of one process to itself, for the tests of what goes over them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.communication.sockets.channel import TLS, Channel, Listener, connect

HERE = "127.0.0.1"
SOON = 30.0
"""Seconds that nothing in a test takes unless it is broken."""


@contextlib.contextmanager
def pair(tls: TLS | None = None) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel: the one that connected ("server" is its peer), and the one that listened."""
    with Listener(HERE, tls) as listener, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(listener.accept, SOON)
        with connect(HERE, listener.port, "server", SOON, tls) as near, coming.result() as far:
            yield near, far


@contextlib.contextmanager
def stranger() -> Iterator[tuple[socket.socket, Channel]]:
    """A plain socket, and the channel of its other end."""
    with Listener(HERE) as listener, socket.create_connection((HERE, listener.port)) as sock:
        with listener.accept(SOON) as channel:
            yield sock, channel


def both(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
