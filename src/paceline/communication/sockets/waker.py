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
        self._rings = False  # a wake-up is under way, and a further one would say the same

    def fileno(self) -> int:
        """What to poll."""
        return self._woken.fileno()

    def wake(self) -> None:
        """End the wait, or the next one; from any thread."""
        if self._rings:
            return
        self._rings = True
        with contextlib.suppress(OSError):  # full of wake-ups that were not read yet, or closed
            self._wake_up.send(b"!")

    def clear(self) -> None:
        """Forget the wake-ups so far; look only then for what they were about."""
        with contextlib.suppress(OSError):
            self._woken.recv(4096)
        self._rings = False  # not before: a wake-up that this forgets would count as under way for ever

    def close(self) -> None:
        """End it."""
        self._wake_up.close()
        self._woken.close()
