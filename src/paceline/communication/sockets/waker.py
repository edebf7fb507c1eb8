# SPDX-License-Identifier: Apache-2.0
"""Ends the wait of another thread at a channel."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """A thread waits for data at its channel *or* for `wake`: see `Channel.wait`."""

    def __init__(self) -> None:
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)

    def fileno(self) -> int:
        """What to poll."""
        return self._woken.fileno()

    def wake(self) -> None:
        """End the wait, or the next one; from any thread."""
        with contextlib.suppress(OSError):  # full of wake-ups that were not read yet, or closed
            self._wake_up.send(b"!")

    def clear(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(OSError):
            self._woken.recv(4096)

    def close(self) -> None:
        """End it."""
        self._wake_up.close()
        self._woken.close()
