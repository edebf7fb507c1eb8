# SPDX-License-Identifier: Apache-2.0
"""The epochs of all loaders: active, closed, or expected to be completed after a resume; and the
ledger's latest changes, for replicas that follow it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from paceline.data.ledger.epoch_ledger import EpochLedger
from paceline.data.ledger.ranges import Ranges


class Epochs:
    """The ledgers of the active epochs; keys are (loader, epoch)."""

    def __init__(self) -> None:
        self._ledgers: dict[tuple[int, int], EpochLedger] = {}
        self._closed: dict[int, int] = {}  # loader -> epochs up to it (incl.) are over, unless active or expected
        self._expected: dict[tuple[int, int], Ranges] = {}

    def __bool__(self) -> bool:
        return bool(self._ledgers or self._closed or self._expected)

    def __iter__(self) -> Iterator[tuple[tuple[int, int], EpochLedger]]:
        """Keys and ledgers, in the order in which the epochs began."""
        return iter(list(self._ledgers.items()))

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._ledgers

    def ledgers(self) -> list[EpochLedger]:
        return list(self._ledgers.values())

    def get(self, loader: int, epoch: int) -> EpochLedger | None:
        return self._ledgers.get((loader, epoch))

    def is_over(self, loader: int, epoch: int) -> bool:
        """Whether an epoch that is not active is over."""
        return epoch <= self.closed(loader) and (loader, epoch) not in self._expected

    def begin(self, key: tuple[int, int], total: int) -> EpochLedger:
        rest = self._expected.pop(key, Ranges([(0, total)]))
        ledger = self._ledgers[key] = EpochLedger(total, Ranges(rest.within(0, total)))
        return ledger

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """When this epoch begins, only these places remain; if there are none, it is over."""
        if rest:
            self._expected[loader, epoch] = rest.copy()
        else:
            self._closed[loader] = max(self.closed(loader), epoch)

    def closed(self, loader: int) -> int:
        """The last epoch that is over, as are all before it that are not `unfinished`; -1 if none is."""
        return self._closed.get(loader, -1)

    def close_settled(self, loader: int) -> None:
        for key, ledger in sorted(self._ledgers.items()):
            if key[0] == loader and ledger.settled:
                self._close(key)

    def close_left(self, loader: int, slowest: int) -> None:
        """Close epochs before `slowest` that were left early and of which nothing is leased."""
        for key, ledger in sorted(self._ledgers.items()):
            if key[0] == loader and key[1] < slowest and ledger.left and not any(ledger.leased.values()):
                self._close(key)

    def _close(self, key: tuple[int, int]) -> None:
        del self._ledgers[key]
        self._closed[key[0]] = max(self.closed(key[0]), key[1])

    def unfinished(self, loader: int) -> dict[int, Ranges]:
        """epoch -> its remaining places, for active and expected epochs that were not left early.

        An epoch that is over, and comes after one that is not, maps to no places.
        """
        ranges = {epoch: rest for (one, epoch), rest in self._expected.items() if one == loader}
        for (one, epoch), ledger in self._ledgers.items():
            if one == loader and not ledger.left:
                ranges[epoch] = ledger.unfinished
        over = range(min(ranges, default=0), self.closed(loader) + 1) if ranges else range(0)
        return {epoch: Ranges() for epoch in over} | ranges

    @property
    def progress(self) -> tuple[int, int]:
        """(epochs that are over, places done in active ones): grows with the work done."""
        return sum(1 + epoch for epoch in self._closed.values()), sum(
            ledger.done.total for ledger in self._ledgers.values()
        )

    def state(self, workers: bool = True) -> dict[str, Any]:
        """State for a checkpoint or replica, as JSON values; without `workers`, all that is not done is free."""
        rows = [
            {
                "key": list(key),
                "total": ledger.total,
                "free": (ledger.free if workers else ledger.unfinished).state(),
                "leased": [[rank, held.state()] for rank, held in ledger.leased.items()] if workers else [],
                "dry": sorted(ledger.dry) if workers else [],
                "left": ledger.left,
            }
            for key, ledger in self._ledgers.items()
        ]
        closed = [list(pair) for pair in self._closed.items()]
        expected = [[list(key), rest.state()] for key, rest in self._expected.items()]
        return {"books": rows, "closed": closed, "expected": expected}

    def load(self, state: dict[str, Any]) -> None:
        self._ledgers = {
            (row["key"][0], row["key"][1]): EpochLedger(
                row["total"],
                Ranges(row["free"]),
                {rank: Ranges(held) for rank, held in row["leased"]},
                set(row["dry"]),
                left=row["left"],
            )
            for row in state["books"]
        }
        self._closed = {loader: epoch for loader, epoch in state["closed"]}
        self._expected = {(key[0], key[1]): Ranges(rest) for key, rest in state["expected"]}


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
