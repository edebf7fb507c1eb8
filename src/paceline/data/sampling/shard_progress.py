# SPDX-License-Identifier: Apache-2.0
"""Shards of unknown length: their places, their distribution over workers, and each worker's progress.

Sample i of the k-th shard of an epoch's order is at place k `UNIT` + i. So a shard is the range k `UNIT` ..
(k + 1) `UNIT` (excl.), of which the places after its last sample are done together with that sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from paceline.data.ledger.ranges import Range, Ranges

UNIT = 1 << 40
"""Places of a shard."""
MOST_SHARDS = 1 << 20
"""Keeps places at or below 2^60, well below `ENDLESS`."""


def cut_at_shards(rest: Iterable[Range]) -> list[Range]:
    """Cut ranges of places where one shard ends and the next begins."""
    parts = []
    for begin, end in rest:
        while begin < end:
            middle = min(end, (begin // UNIT + 1) * UNIT)
            parts.append((begin, middle))
            begin = middle
    return parts


def round_robin(rest: Iterable[Range], workers: int, rank: int) -> Ranges:
    """The places that worker `rank` reads under rules without leases: every N-th of the remaining shards."""
    return Ranges(cut_at_shards(rest)[rank::workers])


class ShardProgress:
    """The places that one worker handed out in a pass, by the number of the batch that held them.

    Attributes:
        entered: places whose work is in the global model.
    """

    def __init__(self) -> None:
        self.entered = Ranges()
        self._later: deque[tuple[int, list[Range]]] = deque()

    def add(self, batches: int, places: list[Range]) -> None:
        """These places were handed out, the last of them with batch number `batches` (from 1)."""
        self._later.append((batches, places))

    def enter(self, batches: int) -> None:
        """The work of the first `batches` batches is in the global model."""
        while self._later and self._later[0][0] <= batches:
            for begin, end in self._later.popleft()[1]:
                self.entered.add(begin, end)

    @property
    def all(self) -> Ranges:
        """All places that were handed out."""
        return Ranges([*self.entered, *(one for _, places in self._later for one in places)])

    def state(self) -> list[Any]:
        later = [[batches, [list(one) for one in places]] for batches, places in self._later]
        return [self.entered.state(), later]

    @classmethod
    def of(cls, state: list[Any]) -> ShardProgress:
        """Restore `state`."""
        progress = cls()
        progress.entered = Ranges(state[0])
        progress._later = deque((batches, [(begin, end) for begin, end in places]) for batches, places in state[1])
        return progress
