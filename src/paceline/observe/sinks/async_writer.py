# SPDX-License-Identifier: Apache-2.0
"""A queue and a thread between a run and a sink: training goes on when the sink is slow or fails."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from paceline.observe.sinks.base import Sink, Values

logger = logging.getLogger("paceline")

QUEUE_SIZE = 1024
CLOSE_TIMEOUT_S = 10.0


class AsyncWriter:
    """Writes values to one sink.

    Args:
        sink: called in a thread of its own.
        name: of the sink, for messages.
        sign: appends rank and host to a message.
        queue_size: calls that may wait; further ones are dropped, counted and reported.

    """

    def __init__(self, sink: Sink, name: str, sign: Callable[[str], str], queue_size: int = QUEUE_SIZE) -> None:
        self._sink, self._name, self._sign = sink, name, sign
        self._queue: queue.Queue[tuple[Values, int]] = queue.Queue(queue_size)
        self._closing = threading.Event()
        self.dropped = self.failed = 0  # calls that were not written, and calls in which the sink raised an error
        # trackers keep their current run in context variables, which a thread does not inherit
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), name="paceline-sink", daemon=True)
        self._thread.start()

    def offer(self, values: Values, step: int) -> None:
        """Queue values; returns at once."""
        try:
            self._queue.put_nowait((values, step))
        except queue.Full:
            if not self.dropped:
                self._warn(f"is too slow: {self._queue.maxsize} calls wait for it, and further calls are dropped")
            self.dropped += 1

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what is queued and close the sink, within `timeout_s`."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.dropped += self._queue.qsize() + 1
        if self.dropped or self.failed:
            self._warn(f"did not get {self.dropped} call(s), which were dropped, and failed at {self.failed}")

    def _work(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            try:
                values, step = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            self._try(self._sink.log, values, step)
        self._try(self._sink.close)

    def _try(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except Exception as error:  # an error of a sink is no reason to stop training
            if not self.failed:
                self._warn(f"failed and is tried again: {type(error).__name__}: {error}")
            self.failed += 1

    def _warn(self, text: str) -> None:
        logger.warning("%s", self._sign(f"the sink {self._name} {text}"))
