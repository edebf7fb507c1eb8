# SPDX-License-Identifier: Apache-2.0
"""A worker's client of the data ledger, which the control plane keeps.

A worker without data left waits until the epoch is over for all workers, because live workers take over the data of a
lost one. Meanwhile it joins exchanges with the work that it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.data.ledger.ranges import Ranges
from paceline.errors import CheckpointError
from paceline.flow.control import ControlClient
from paceline.update.exchange.header import ExchangeHeader


class UncommittedPlaces:
    """Places of the data by the step that used them, until an exchange with that step is committed."""

    def __init__(self) -> None:
        self._by_step: deque[tuple[int, list[Mark]]] = deque()

    def add(self, step: int, marks: list[Mark]) -> None:
        """A step has used these places."""
        self._by_step.append((step, marks))

    def drop(self, committed: int) -> None:
        """The first `committed` steps are in the global model, or their places were given back."""
        while self._by_step and self._by_step[0][0] <= committed:
            self._by_step.popleft()

    def of_exchange(self, own: ExchangeHeader, committed: int) -> tuple[list[Mark], list[Mark], dict[str, Any]]:
        """The marks of an exchange for the ledger.

        Args:
            own: this worker's header.
            committed: steps of this worker that are in the exchange, or were in earlier ones.

        Returns:
            The places whose work enters the global model; those whose work was rejected, so that another worker uses
            them; facts for the status.
        """
        marks = [mark for step, some in self._by_step if step <= committed for mark in some]
        facts = {"minibatches": own.minibatches, "total": own.total}
        return ([], marks, facts) if own.brings and own.factor == 0 else (marks, [], facts)


LOOK_EVERY_S = 0.2
"""How long a worker without data waits for news before it asks again, seconds."""


class ControlLedgerClient:
    """The client of the ledger; see :class:`paceline.data.ledger.leases.Leases`.

    Args:
        control: the client of the control plane.
        join: called while there is no data: joins the exchange to which this worker is called, if any.
        applied: the exchange whose state this worker's model has.
    """

    def __init__(self, control: ControlClient, join: Callable[[], None], applied: Callable[[], int]) -> None:
        self._control, self._join, self._applied = control, join, applied

    def ask(self, question: Question) -> Mark | None:
        """A lease; None if there is none; with `dry`, None only when the epoch is over for all workers."""
        while True:
            kind, mark = self._control.ask(question)
            if kind == "work":
                return mark
            if kind == "over" or not question.dry:
                return None
            self._join()
            self._control.wait_news(LOOK_EVERY_S)

    def hand_out(self, marks: list[Mark]) -> None:
        """Does nothing: an exchange is committed as a whole, or not at all."""

    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        """This worker ends its pass before the epoch is over, and returns these places of its leases."""
        self._control.tell("left", loader, epoch, [list(mark) for mark in marks])

    def ends(self, loader: int, epoch: int, total: int) -> None:
        """The loader turned out to have only so many places in this epoch."""
        self._control.tell("ends", loader, epoch, total)

    def learn(self, news: Any) -> None:
        """Does nothing: the control plane keeps the ledger."""

    def done(self, marks: list[Mark]) -> None:
        """This worker has used these places, but not for training."""
        if marks:
            self._control.tell("done", [list(mark) for mark in marks])

    def waits(self, now: bool) -> None:
        """Does nothing: the members wait for each other at every exchange."""

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """When this epoch begins, only these places are to be done."""
        self._control.tell("expect", loader, epoch, rest.state())

    def state(self) -> dict[str, Any] | None:
        """The ledger's state for a checkpoint.

        Raises:
            CheckpointError: ledger and model are of different exchanges.
        """
        exchange, ledger = self._control.ledger()
        if exchange != self._applied():
            raise CheckpointError(
                f"the ledger is that of exchange {exchange}, and the model that of exchange {self._applied()}"
            )
        return ledger

    def load(self, state: dict[str, Any]) -> None:
        """Does nothing: the members report the remaining places by `expect`."""
