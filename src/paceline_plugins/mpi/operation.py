# SPDX-License-Identifier: Apache-2.0
"""An operation over MPI in flight: a few requests one after another, and how often to ask whether they are complete."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

Requests = list[Any]
Steps = Generator[Requests, list[Any], None]
"""Yields MPI requests, gets their statuses once they are complete, and yields the next."""

SPIN_S = 0.002
BYTES_PER_S = 100e6
"""A worker asks without pause for `SPIN_S` and as long as the bytes would take at this rate; then it sleeps between."""
LONGEST_SLEEP_S = 0.002
QUESTIONS = 50
"""In a row: with a clock and a lock between any two, 100 MB in shared memory took four times as long."""


class MpiOperation:
    """An operation in flight; a `Pending`.

    Args:
        mpi: the module `mpi4py.MPI`.
        finish: waits until `advance` says that the operation is complete, or raises.
        operation: its name, for messages.
        number: counts the operations of this process.
        steps: its requests; they hold the memory that MPI reads and writes.
        nbytes: roughly, of this worker.
        timeout_s: for all steps together, seconds.
    """

    def __init__(
        self,
        mpi: Any,
        finish: Callable[[MpiOperation], None],
        operation: str,
        number: int,
        steps: Steps,
        nbytes: int,
        timeout_s: float,
    ) -> None:
        self._mpi, self._finish, self._steps = mpi, finish, steps
        self.operation, self.number, self.nbytes, self.timeout_s = operation, number, nbytes, timeout_s
        self.closed, self._advancing = False, threading.Lock()
        self._statuses: list[Any] = []
        self._requests: Requests | None = next(steps, None)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self._requests is None

    def advance(self) -> bool:
        """Begin the next steps as far as MPI is ready; whether the operation is complete. One thread at a time does."""
        if not self._advancing.acquire(blocking=False):
            return False
        try:
            while self._requests is not None:
                if not self._asks(self._requests):
                    return False
                statuses, self._statuses = self._statuses, []
                try:
                    self._requests = self._steps.send(statuses)
                except StopIteration:
                    self._requests = None
            return True
        finally:
            self._advancing.release()

    def _asks(self, requests: Requests) -> bool:
        """Ask `QUESTIONS` times whether the requests are complete; MPI sends and receives while it is asked."""
        if not self._statuses:
            self._statuses = [self._mpi.Status() for _ in requests]
        test, statuses = self._mpi.Request.Testall, self._statuses
        return any(test(requests, statuses) for _ in range(QUESTIONS))

    def wait(self) -> None:
        if not self.complete:
            self._finish(self)


class Pauses:
    """Between two questions: none at first, then longer ones."""

    def __init__(self, nbytes: int) -> None:
        self._spin_until = time.monotonic() + SPIN_S + nbytes / BYTES_PER_S
        self._sleep_s = 0.00005

    def pause(self) -> None:
        """Let other threads and processes run."""
        if time.monotonic() < self._spin_until:
            os.sched_yield()
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(LONGEST_SLEEP_S, 1.5 * self._sleep_s)
