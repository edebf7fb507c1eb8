# SPDX-License-Identifier: Apache-2.0
"""A port that the program names is rank 0's: another worker of the host listens at a free one, and connects to that."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from paceline.core.world import host_name
from paceline_plugins.zero.callers import OURS, calling_module
from paceline_plugins.zero.patches import Patches

HERE = ("", "localhost", "127.0.0.1", "0.0.0.0", "::1", "::")
"""Names of this host."""


class Ports:
    """The ports of a worker other than rank 0."""

    def __init__(self) -> None:
        self._own: dict[int, int] = {}  # the program's port -> where this worker listens

    def install(self, patches: Patches) -> None:
        """Patch sockets."""
        patches.replace(socket.socket, "bind", self._bind)
        for name in ("connect", "connect_ex"):
            patches.replace(socket.socket, name, self._connect)

    def _bind(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def bind(sock: socket.socket, address: Any) -> None:
            if not isinstance(address, tuple) or not address[1] or _asked_by_paceline():
                original(sock, address)
                return
            original(sock, (address[0], 0, *address[2:]))
            self._own[address[1]] = sock.getsockname()[1]

        return bind

    def _connect(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def connect(sock: socket.socket, address: Any) -> Any:
            if isinstance(address, tuple) and address[1] in self._own and address[0] in (*HERE, host_name()):
                address = (address[0], self._own[address[1]], *address[2:])
            return original(sock, address)

        return connect


def _asked_by_paceline() -> bool:
    """Whether paceline binds, by `socket.create_server` or not."""
    return calling_module(1).startswith(OURS) or calling_module(2).startswith(OURS)
