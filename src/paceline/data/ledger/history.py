# SPDX-License-Identifier: Apache-2.0
"""What became of the books lately, for readers that follow the ledger."""

from __future__ import annotations

from collections import deque
from itertools import islice

from paceline.data.ledger.epoch_ledger import EpochLedger

HISTORY = 1024
"""Entries that are kept for readers; one that is further behind gets the whole ledger."""


class History:
    """The last entries, and what each reader knows of them."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, ...]] = deque(maxlen=HISTORY)
        self._number = 0  # of the last entry
        self._told: dict[int, int] = {}  # reader -> the last entry that it knows

    def add(self, loader: int, epoch: int, begin: int, end: int, ledger: EpochLedger) -> None:
        """Places begin .. end (excl.) are done; the book may have been shortened or left."""
        self._number += 1
        self._entries.append((loader, epoch, begin, end, ledger.total, int(ledger.left)))

    def missing(self, reader: int) -> list[list[int]] | None:
        """The entries that `reader` does not know, which it is told now; None where it needs the whole ledger."""
        since, self._told[reader] = self._told.get(reader, -1), self._number
        missing = self._number - since
        if since < 0 or missing > len(self._entries):
            return None
        return [list(one) for one in islice(self._entries, len(self._entries) - missing, None)] if missing else []

    def forget_readers(self) -> None:
        """Nobody knows this ledger any more."""
        self._told = {}
