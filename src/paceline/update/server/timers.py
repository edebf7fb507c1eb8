# SPDX-License-Identifier: Apache-2.0
"""Delayed actions, which may also be run early."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from paceline.core import runtime


class Once:
    """An action that runs at the first call only."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action, self._taken = action, runtime.Lock()

    def __call__(self) -> None:
        """Run the action, unless it ran before."""
        if self._taken.acquire(blocking=False):
            self._action()


class Timers:
    """Runs actions at their time; `run` is the body of a thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Once]] = []
        self._changed = runtime.Condition()
        self._number, self._over = 0, False

    def put(self, after_s: float, once: Once) -> None:
        """Run an action in `after_s` seconds."""
        with self._changed:
            self._number += 1
            heapq.heappush(self._due, (runtime.monotonic() + after_s, self._number, once))
            self._changed.notify()

    def run(self) -> None:
        """Run what is due, until `close`."""
        while (once := self._next()) is not None:
            once()

    def _next(self) -> Once | None:
        with self._changed:
            while not self._over:
                left = self._due[0][0] - runtime.monotonic() if self._due else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left)
        return None

    def close(self) -> None:
        """Drop all pending actions."""
        with self._changed:
            self._over = True
            self._changed.notify()
