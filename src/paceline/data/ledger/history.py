# SPDX-License-Identifier: Apache-2.0
"""The ledger's latest changes, for replicas that follow it."""

from __future__ import annotations

from collections import deque
from itertools import islice

from paceline.data.ledger.epoch_ledger import EpochLedger

HISTORY = 1024
"""Entries kept; a reader that lags by more gets the whole ledger."""


class History:
    """The last changes, and which of them each reader has."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, ...]] = deque(maxlen=HISTORY)
        self._number = 0  # of the last entry
        self._told: dict[int, int] = {}  # reader -> number of the last entry sent to it

    def add(self, loader: int, epoch: int, begin: int, end: int, ledger: EpochLedger) -> None:
        """Places begin .. end (excl.) are done; the epoch may have been shortened or left early."""
        self._number += 1
        self._entries.append((loader, epoch, begin, end, ledger.total, int(ledger.left)))

    def missing(self, reader: int) -> list[list[int]] | None:
        """The entries that `reader` lacks, marked as sent; None if it needs the whole ledger."""
        since, self._told[reader] = self._told.get(reader, -1), self._number
        missing = self._number - since
        if since < 0 or missing > len(self._entries):
            return None
        return [list(one) for one in islice(self._entries, len(self._entries) - missing, None)] if missing else []

    def forget_readers(self) -> None:
        """The ledger was replaced, so each reader needs the whole of it."""
        self._told = {}
