# SPDX-License-Identifier: Apache-2.0
"""The leases that a worker holds; it reports them to a restarted control plane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.ranges import Ranges


class HeldLeases:
    """Unsettled leases: neither committed nor given back."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Ranges] = {}

    def add(self, mark: Mark) -> None:
        """Add a lease."""
        loader, epoch, begin, end = mark
        self._held.setdefault((loader, epoch), Ranges()).add(begin, end)

    def settle(self, marks: Iterable[Sequence[int]]) -> None:
        """These are committed or given back."""
        for loader, epoch, begin, end in marks:
            held = self._held.get((loader, epoch))
            if held is not None:
                held.remove(begin, end)
                if not held:
                    del self._held[loader, epoch]

    def clear(self) -> None:
        """Drop all leases."""
        self._held.clear()

    def marks(self) -> list[Mark]:
        """All held leases."""
        return [(*key, begin, end) for key, held in self._held.items() for begin, end in held]
