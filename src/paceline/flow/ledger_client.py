# SPDX-License-Identifier: Apache-2.0
"""A worker's way to the ledger of the data, which the control plane keeps.

A worker that has nothing left to do waits until the epoch is over for all workers, because what a lost worker leaves is
done by those who live. It comes to the exchanges of the others meanwhile, with whatever it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.data.ledger.ranges import Ranges
from paceline.errors import CheckpointError
from paceline.flow.control import Member

LOOK_EVERY_S = 0.2
"""How long a worker that has nothing to do waits for news before it asks again."""


class LedgerClient:
    """The way to the ledger; see :class:`paceline.data.ledger.assignment.Leases`.

    Args:
        member: the way to the control plane.
        join: called while there is nothing to do: comes to the exchange to which the others have called, if any.
        applied: the exchange whose state this worker's model has.
    """

    def __init__(self, member: Member, join: Callable[[], None], applied: Callable[[], int]) -> None:
        self._member, self._join, self._applied = member, join, applied

    def ask(self, question: Question) -> Mark | None:
        """A lease; None where there is none, and with `dry` only when the epoch is over for all workers."""
        while True:
            kind, mark = self._member.ask(question)
            if kind == "work":
                return mark
            if kind == "over" or not question.dry:
                return None
            self._join()
            self._member.wait_news(LOOK_EVERY_S)

    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        """This worker ends its pass before the epoch is over; it will not do these places of its leases."""
        self._member.tell("left", loader, epoch, [list(mark) for mark in marks])

    def ends(self, loader: int, epoch: int, total: int) -> None:
        """The loader turned out to have only so many places in this epoch."""
        self._member.tell("ends", loader, epoch, total)

    def learn(self, news: Any) -> None:
        """Nothing: the control plane keeps the ledger."""

    def done(self, marks: list[Mark]) -> None:
        """This worker has used these places for something else than training."""
        if marks:
            self._member.tell("done", [list(mark) for mark in marks])

    def waits(self, now: bool) -> None:
        """Nothing: the members wait for each other at every exchange."""

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """When this epoch begins, only these places are to be done."""
        self._member.tell("expect", loader, epoch, rest.state())

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint holds of the ledger.

        Raises:
            CheckpointError: the ledger is that of another exchange than the model.
        """
        exchange, ledger = self._member.ledger()
        if exchange != self._applied():
            raise CheckpointError(
                f"the ledger is that of exchange {exchange}, and the model that of exchange {self._applied()}"
            )
        return ledger

    def load(self, state: dict[str, Any]) -> None:
        """Nothing: the members tell the ledger what is expected."""
