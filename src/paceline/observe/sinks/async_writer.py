# SPDX-License-Identifier: Apache-2.0
"""A queue and a thread between a run and a sink: the sink may be slow, or fail, and training goes on."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from paceline.observe.sinks.base import Sink, Values

logger = logging.getLogger("paceline")

ROOM = 1024
"""Calls of `log` that may wait for a sink."""
PATIENCE_S = 10.0
"""So long is a sink waited for at the end of a run."""


class AsyncWriter:
    """Carries values to one sink.

    Args:
        sink: takes them, in a thread of its own.
        name: of the sink, for messages.
        sign: puts rank and host behind a message.
        room: calls that may wait; those that come then are dropped, counted and said.

    Attributes:
        dropped: calls that found no room, or were not written at the end.
        failed: calls that the sink raised an error for.
    """

    def __init__(self, sink: Sink, name: str, sign: Callable[[str], str], room: int = ROOM) -> None:
        self._sink, self._name, self._sign, self._room = sink, name, sign, room
        self._queue: queue.Queue[tuple[Values, int]] = queue.Queue(room)
        self._over = threading.Event()
        self.dropped = self.failed = 0
        # trackers keep the run that is under way in context variables, which a thread does not inherit
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), name="paceline-sink", daemon=True)
        self._thread.start()

    def offer(self, values: Values, step: int) -> None:
        """Hand values over; returns at once."""
        try:
            self._queue.put_nowait((values, step))
        except queue.Full:
            if not self.dropped:
                self._warn(f"is too slow: {self._room} calls wait for it, and what comes now is dropped")
            self.dropped += 1

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Write what waits and close the sink; not for longer than `patience_s`."""
        self._over.set()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self.dropped += self._queue.qsize() + 1
        if self.dropped or self.failed:
            self._warn(f"did not get {self.dropped} call(s), which were dropped, and failed at {self.failed}")

    def _work(self) -> None:
        while not (self._over.is_set() and self._queue.empty()):
            try:
                values, step = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            self._try(self._sink.log, values, step)
        self._try(self._sink.close)

    def _try(self, act: Callable[..., None], *about: Any) -> None:
        try:
            act(*about)
        except Exception as error:  # whatever a sink raises is no reason to stop training
            if not self.failed:
                self._warn(f"failed and goes on being tried: {type(error).__name__}: {error}")
            self.failed += 1

    def _warn(self, text: str) -> None:
        logger.warning("%s", self._sign(f"the sink {self._name} {text}"))
