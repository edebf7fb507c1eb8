# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch: which sample stands at which place. A pure function of (data, seed, epoch), on every
worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from paceline import randomness
from paceline.data.permutation import Permutation, Places
from paceline.data.ranges import Range


class Order(Protocol):
    """Samples in a row."""

    def __len__(self) -> int:
        """How many."""

    def at(self, ranges: Iterable[Range]) -> Sequence[Any]:
        """What stands at these places, as the data set is indexed."""


class InTurn:
    """0, 1, 2, ...: as the data lie.

    Args:
        n: number of samples.
    """

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def at(self, ranges: Iterable[Range]) -> Sequence[int]:
        """What stands at these places."""
        return [place for begin, end in ranges for place in range(begin, end)]


class Shuffled:
    """A seeded permutation that takes no memory.

    Args:
        n: number of samples.
        seed: of the run.
        epoch: each has an order of its own.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._permutation = Permutation(n, randomness.mix(seed, epoch))

    def __len__(self) -> int:
        return self._permutation.n

    def at(self, ranges: Iterable[Range]) -> Sequence[int]:
        """What stands at these places."""
        found: list[int] = self._permutation.at(places(ranges)).tolist()
        return found


class Drawn:
    """What a sampler of the user's own gave, one after another.

    Args:
        items: indices, keys, or whole batches of them.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def at(self, ranges: Iterable[Range]) -> Sequence[Any]:
        """What stands at these places."""
        return [item for begin, end in ranges for item in self._items[begin:end]]


class InShards:
    """Shards in a seeded order, and within a buffer of so many of them their samples in a seeded order.

    So an epoch is read file by file, a few at a time, and neighbours in the order still come from different files.

    Args:
        sizes: samples of each shard, in the order of the data set's indices.
        seed, epoch: of the order.
        buffer: shards whose samples are mixed.
    """

    def __init__(self, sizes: Sequence[int], seed: int, epoch: int, buffer: int = 8) -> None:
        if buffer < 1:
            raise ValueError(f"buffer must be at least 1 shard, got {buffer}")
        self._seed, self._epoch, self._buffer = seed, epoch, buffer
        counts = np.asarray(sizes, dtype=np.int64)
        self._first = np.cumsum(counts) - counts  # sample id at which each shard begins
        self.shards = Permutation(len(counts), randomness.mix(seed, epoch, -1)).at(np.arange(len(counts)))
        self._ends = np.cumsum(counts[self.shards])  # places at which each shard of the order ends
        self._counts = counts

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def at(self, ranges: Iterable[Range]) -> Sequence[int]:
        """What stands at these places."""
        return [sample for begin, end in ranges for sample in self._between(begin, end)]

    def _between(self, begin: int, end: int) -> list[int]:
        found: list[int] = []
        while begin < end:
            group = int(np.searchsorted(self._ends, begin, side="right")) // self._buffer
            first, last = group * self._buffer, min((group + 1) * self._buffer, len(self._ends))
            base = int(self._ends[first - 1]) if first else 0
            stop = min(end, int(self._ends[last - 1]))
            found += self._mixed(group, first, last, base, begin, stop)
            begin = stop
        return found

    def _mixed(self, group: int, first: int, last: int, base: int, begin: int, end: int) -> list[int]:
        """The places begin .. end of a buffer of shards first .. last of the order."""
        size = int(self._ends[last - 1]) - base
        mixed = Permutation(size, randomness.mix(self._seed, self._epoch, group)).at(np.arange(begin, end) - base)
        which = first + np.searchsorted(self._ends[first:last] - base, mixed, side="right")
        shard = self.shards[which]
        offset = mixed - (self._ends[which] - base - self._counts[shard])
        found: list[int] = (self._first[shard] + offset).tolist()
        return found


def places(ranges: Iterable[Range]) -> Places:
    """The numbers of some ranges, one after another."""
    rows = [np.arange(begin, end, dtype=np.int64) for begin, end in ranges]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
