# SPDX-License-Identifier: Apache-2.0
"""Passes events to the log, in order, in a thread of its own: a slow disk delays no worker."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any

from paceline.core import runtime

OFTEN = 20
"""Events of unauthenticated connections within a minute, at most; the rest are counted."""
_LOG = logging.getLogger("paceline.control")


class EventSender:
    """Calls `told` with each event's (kind, about)."""

    def __init__(self, told: Callable[[str, dict[str, Any]], None]) -> None:
        self._told = told
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = runtime.SimpleQueue()
        self._guard = runtime.Lock()
        self._count, self._since, self._left_out = 0, runtime.monotonic(), 0
        self._thread = runtime.thread(self._run, "paceline-control-log")
        self._thread.start()

    def tell(self, kind: str, about: dict[str, Any]) -> None:
        """Queue an event."""
        self._queue.put((kind, about))

    def limited(self, kind: str, about: dict[str, Any]) -> None:
        """Queue an event that an unauthenticated connection could cause without limit."""
        with self._guard:
            now = runtime.monotonic()
            if now - self._since > 60:
                self._since, self._count = now, 0
            self._count += 1
            if self._count > OFTEN:
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
        self.tell(kind, {**about, **({"not_shown": left_out} if left_out else {})})

    def close(self) -> None:
        """Deliver the queued events, and stop."""
        self._queue.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            try:
                self._told(*one)
            except Exception:  # a failing log must not end the run
                _LOG.exception("an event of the control plane could not be told: %s", one[0])
