# SPDX-License-Identifier: Apache-2.0
"""Ends the connections of a gloo group, whose operations would otherwise wait for their deadlines.

torch offers no way to abort gloo's operations, and a group closes its sockets only when the last of its operations has
ended. A group listens at a port of its own, and of each pair of its members one accepts the other's connection there.
So a process finds the connections that its group has accepted by their local port, and shuts them down: the operations
of both members fail at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from typing import TypeVar

Made = TypeVar("Made")
DESCRIPTORS = "/dev/fd"


def make(build: Callable[[], Made]) -> tuple[Made, int | None]:
    """What `build` makes, and the port at which it listens; None if another thread has begun to listen meanwhile."""
    before = _listening()
    made = build()
    new = _listening() - before
    return made, new.pop() if len(new) == 1 else None


def shut_down(ports: set[int]) -> None:
    """End all connections of this process that were accepted at one of these ports."""
    for sock in _sockets():
        with contextlib.suppress(OSError):
            if sock.getsockname()[1] in ports and not _listens(sock):
                sock.shutdown(socket.SHUT_RDWR)


def _listening() -> set[int]:
    return {sock.getsockname()[1] for sock in _sockets() if _listens(sock)}


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, each open only until the next one."""
    if not os.path.isdir(DESCRIPTORS):  # no Unix
        return
    for name in os.listdir(DESCRIPTORS):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield sock
