# SPDX-License-Identifier: Apache-2.0
"""Leases of samples between virtual workers: one ledger, which answers without delay; waits take simulated time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges


class SimulatedLedgerClient:
    """A virtual worker's access to the ledger.

    Args:
        rank: of the worker.
        ledger: shared by all workers of the run.
        keeps: whether the ledger goes into this worker's checkpoint.
        now: simulated time, seconds.
        soon: schedules a function at this time, after those of lower ranks.
        idle: called when this worker has no work: no worker may wait for its clock.
        wait: called with a condition; lets other workers run until it holds.
    """

    def __init__(
        self,
        rank: int,
        ledger: Ledger,
        keeps: bool,
        now: Callable[[], float],
        soon: Callable[[Callable[[], None]], None],
        idle: Callable[[], None],
        wait: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._rank, self._ledger, self._keeps = rank, ledger, keeps
        self._now, self._soon, self._idle, self._wait = now, soon, idle, wait

    def ask(self, question: Question) -> Mark | None:
        """A lease; None where there is none, and with `dry` only when the epoch is over for all workers."""
        answers: list[Mark | None] = []
        self._soon(lambda: answers.append(self._ask(question)))  # independent of which worker ran last
        self._wait(lambda: bool(answers))
        mark = answers[0]
        if mark is not None or not question.dry or self._over(question):
            return mark
        self._idle()
        leased: list[Mark] = []

        def answered() -> bool:
            if not leased:
                leased.extend(mark for mark in [self._ask(question)] if mark is not None)
            return bool(leased) or self._over(question)

        self._wait(answered)
        return leased[0] if leased else None

    def _ask(self, question: Question) -> Mark | None:
        return self._ledger.ask(self._rank, question, self._now())

    def _over(self, question: Question) -> bool:
        return self._ledger.over(question.loader, question.epoch)

    def hand_out(self, marks: list[Mark]) -> None:
        """Nothing: no worker is lost, so that no push is in some shards only."""

    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        """End this worker's pass before the epoch is over, and return these sample ranges of its leases."""
        self._ledger.leave_early(self._rank, loader, epoch, marks)

    def ends(self, loader: int, epoch: int, total: int) -> None:
        """Report that the loader has only `total` samples in this epoch."""
        self._ledger.ends(loader, epoch, total)

    def learn(self, news: Any) -> None:
        """Nothing: all workers share one ledger."""

    def done(self, marks: list[Mark]) -> None:
        """Report samples that this worker used without a push; it has no more to push."""
        self._ledger.done(self._rank, marks)

    def waits(self, now: bool) -> None:
        """Report whether this worker waits at a barrier, so that no worker may wait for its samples."""
        self._ledger.waits(self._rank, now)

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """Restrict this epoch, when it begins, to these samples."""
        self._ledger.expect(loader, epoch, rest)

    def state(self) -> dict[str, Any] | None:
        """The ledger's part of a checkpoint; None on workers that do not keep it."""
        return self._ledger.state(self._now()) if self._keeps else None

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave."""
        self._ledger.load(state, self._now())
