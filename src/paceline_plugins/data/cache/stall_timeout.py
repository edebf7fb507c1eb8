# SPDX-License-Identifier: Apache-2.0
"""Polling with a deadline that starts again at every sign of progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SHORTEST_S, LONGEST_S = 0.001, 0.02
"""Of a pause between two looks."""


class StallTimeout:
    """Pauses between looks, and raises when there was no progress for too long.

    Args:
        timeout_s: how long is too long.
        progress: a value that changes with progress, such as the size of a download; may raise OSError.
        error: makes the error, from the seconds waited.
        news: ends a pause when it is notified; other processes cannot do that.
    """

    def __init__(
        self,
        timeout_s: float,
        progress: Callable[[], object],
        error: Callable[[float], Exception],
        news: threading.Condition | None = None,
    ) -> None:
        self._news = news or threading.Condition()
        self._timeout_s, self._progress, self._error = timeout_s, progress, error
        self._seen: object = None
        self._since = time.monotonic()
        self._pause_s = SHORTEST_S

    def wait(self) -> None:
        """Sleep before the next look, longer each time, or raise."""
        try:
            seen = self._progress()
        except OSError:
            seen = None
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > self._timeout_s:
            raise self._error(now - self._since)
        with self._news:
            self._news.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_S)
