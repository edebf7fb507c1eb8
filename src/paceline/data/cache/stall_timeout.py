# SPDX-License-Identifier: Apache-2.0
"""Waiting with a deadline that starts again whenever what one waits for has moved."""

from __future__ import annotations

import time
from collections.abc import Callable


class StallTimeout:
    """Called before each further look; raises when nothing has moved for too long.

    Args:
        timeout_s: how long is too long.
        seen: what moves, such as the size of a file that another process is fetching; may raise OSError.
        error: makes the error, from the seconds waited.
    """

    def __init__(self, timeout_s: float, seen: Callable[[], object], error: Callable[[float], Exception]) -> None:
        self._timeout_s, self._look, self._error = timeout_s, seen, error
        self._seen: object = None
        self._since = time.monotonic()

    def __call__(self) -> None:
        try:
            seen = self._look()
        except OSError:
            seen = None
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > self._timeout_s:
            raise self._error(now - self._since)
