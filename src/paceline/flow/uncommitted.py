# SPDX-License-Identifier: Apache-2.0
"""The places of the data that this worker has trained on and not yet committed to the global model."""

from __future__ import annotations

from collections import deque
from typing import Any

from paceline.data.ledger.epoch_ledger import Mark
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
            The places whose work enters the global model; those whose work was left out, so that another worker uses
            them; facts for the status.
        """
        marks = [mark for step, some in self._by_step if step <= committed for mark in some]
        facts = {"minibatches": own.minibatches, "total": own.total}
        return ([], marks, facts) if own.brings and own.factor == 0 else (marks, [], facts)
