# SPDX-License-Identifier: Apache-2.0
"""Samples that a worker has taken and not pushed, for each client: all clients push what they made of a batch."""

from __future__ import annotations

from collections.abc import Callable

from paceline.data.ledger.epoch_ledger import Mark


class UnpushedSamples:
    """The sample ranges that each client has not pushed.

    Args:
        take: gives the ranges that the loaders have handed out since the last call.
        clients: how many push what they make of a batch; the pushes of the first one count the samples.
    """

    def __init__(self, take: Callable[[], list[Mark]], clients: int) -> None:
        self._take = take
        self._pending: list[list[Mark]] = [[] for _ in range(max(1, clients))]

    def push(self, client: int) -> list[Mark]:
        """The sample ranges of a client's push."""
        taken = self._take()
        for pending in self._pending:
            pending += taken
        marks, self._pending[client] = self._pending[client], []
        return marks

    def rest(self) -> list[Mark]:
        """The ranges that will not be pushed."""
        marks = self.push(0)
        self._pending = [[] for _ in self._pending]
        return marks

    @property
    def waiting(self) -> list[Mark]:
        """Ranges that another client has pushed and the first has not."""
        return list(self._pending[0])
