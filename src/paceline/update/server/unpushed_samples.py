# SPDX-License-Identifier: Apache-2.0
"""Places of the data that a worker has in hand, for each of its clients: all of them push what they made of a batch."""

from __future__ import annotations

from collections.abc import Callable

from paceline.data.ledger.epoch_ledger import Mark


class UnpushedSamples:
    """What was handed out and is not pushed yet, by client.

    Args:
        take: gives the places that were handed out since it was called last.
        clients: how many push what they make of a batch; with the first one's pushes places are counted.
    """

    def __init__(self, take: Callable[[], list[Mark]], clients: int) -> None:
        self._take = take
        self._pending: list[list[Mark]] = [[] for _ in range(max(1, clients))]

    def push(self, client: int) -> list[Mark]:
        """The places of what a client pushes now."""
        taken = self._take()
        for pending in self._pending:
            pending += taken
        marks, self._pending[client] = self._pending[client], []
        return marks

    def rest(self) -> list[Mark]:
        """All that was handed out and will not be pushed."""
        marks = self.push(0)
        self._pending = [[] for _ in self._pending]
        return marks

    @property
    def waiting(self) -> list[Mark]:
        """Places that another client has pushed and the first has not."""
        return list(self._pending[0])
