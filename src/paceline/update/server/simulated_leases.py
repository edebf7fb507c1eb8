# SPDX-License-Identifier: Apache-2.0
"""Leases of data between virtual workers: one ledger, asked without delay, and simulated time passes in a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges


class SimulatedLedgerClient:
    """A virtual worker's way to the ledger.

    Args:
        rank: of the worker.
        ledger: that all workers of the run share.
        keeps: whether it goes into this worker's checkpoint.
        now: simulated time, seconds.
        soon: called with what is to happen next, after all that happens at this moment by lower ranks.
        rest: called when this worker has nothing to do: nobody is to wait for its clock.
        wait: called with a condition; lets the others work until it holds.
    """

    def __init__(
        self,
        rank: int,
        ledger: Ledger,
        keeps: bool,
        now: Callable[[], float],
        soon: Callable[[Callable[[], None]], None],
        rest: Callable[[], None],
        wait: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._rank, self._ledger, self._keeps = rank, ledger, keeps
        self._now, self._soon, self._rest, self._wait = now, soon, rest, wait

    def ask(self, question: Question) -> Mark | None:
        """A lease; None where there is none, and with `dry` only when the epoch is over for everybody."""
        answers: list[Mark | None] = []
        self._soon(lambda: answers.append(self._ask(question)))  # in an order that does not depend on who had the baton
        self._wait(lambda: bool(answers))
        mark = answers[0]
        if mark is not None or not question.dry or self._over(question):
            return mark
        self._rest()
        found: list[Mark] = []

        def answered() -> bool:
            if not found:
                found.extend(mark for mark in [self._ask(question)] if mark is not None)
            return bool(found) or self._over(question)

        self._wait(answered)
        return found[0] if found else None

    def _ask(self, question: Question) -> Mark | None:
        return self._ledger.ask(self._rank, question, self._now())

    def _over(self, question: Question) -> bool:
        return self._ledger.over(question.loader, question.epoch)

    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        """This worker ends its pass before the epoch is over; it will not do these places of its leases."""
        self._ledger.leave_early(self._rank, loader, epoch, marks)

    def ends(self, loader: int, epoch: int, total: int) -> None:
        """The loader turned out to have only so many places in this epoch."""
        self._ledger.ends(loader, epoch, total)

    def learn(self, news: Any) -> None:
        """Nothing: all have one ledger."""

    def done(self, marks: list[Mark]) -> None:
        """This worker has used these places for something else than a push, and has no more to push."""
        self._ledger.done(self._rank, marks)

    def waits(self, now: bool) -> None:
        """Whether this worker waits for the others, as at a checkpoint: its places are not to be waited for."""
        self._ledger.waits(self._rank, now)

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """When this epoch begins, only these places are to be done."""
        self._ledger.expect(loader, epoch, rest)

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint holds of the ledger; None on workers that do not keep it."""
        return self._ledger.state(self._now()) if self._keeps else None

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        self._ledger.load(state, self._now())
