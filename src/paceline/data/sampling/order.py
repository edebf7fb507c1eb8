# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch: which sample stands at which place. A pure function of (data, seed, epoch), on every
worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from paceline.core import rng
from paceline.data.ledger.ranges import Range
from paceline.data.sampling.permutation import Permutation, Places

TURNED = 2
"""Buffers among which shards change their places when an epoch goes backwards through the last one's."""


class Order(Protocol):
    """Samples in a row."""

    def __len__(self) -> int:
        """How many."""

    def at(self, ranges: Iterable[Range]) -> Sequence[Any]:
        """What stands at these places, as the data set is indexed."""


class Sequential:
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
        self._permutation = Permutation(n, rng.mix(seed, epoch))

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

    With `turns`, an epoch goes through the shards backwards, as the epoch before went through them, but for a shuffle
    among every `TURNED` buffers. A cache that drops what was used least recently, and holds c of n shards, has no hit
    when an epoch begins anew with the first; so it has c of n.

    Args:
        sizes: samples of each shard, in the order of the data set's indices.
        seed, epoch: of the order.
        buffer: shards whose samples are mixed.
        turns: whether each epoch begins with the shards that the last one ended with.
    """

    def __init__(self, sizes: Sequence[int], seed: int, epoch: int, buffer: int = 8, turns: bool = False) -> None:
        if buffer < 1:
            raise ValueError(f"buffer must be at least 1 shard, got {buffer}")
        self._seed, self._epoch, self._buffer = seed, epoch, buffer
        counts = np.asarray(sizes, dtype=np.int64)
        self._first = np.cumsum(counts) - counts  # sample id at which each shard begins
        self.shards = (
            _turning(len(counts), seed, epoch, TURNED * buffer) if turns else _shards(len(counts), seed, epoch)
        )
        self._ends = np.cumsum(counts[self.shards])  # places at which each shard of the order ends
        self._counts = counts

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def at(self, ranges: Iterable[Range]) -> Sequence[int]:
        """What stands at these places."""
        return [sample for begin, end in ranges for sample in self._between(begin, end)]

    @property
    def window(self) -> int:
        """Places of a buffer of shards, on average."""
        return max(1, len(self) * min(self._buffer, len(self._counts)) // max(1, len(self._counts)))

    def first(self, shard: int) -> int:
        """The first sample of a shard."""
        return int(self._first[shard])

    def windows(self, ranges: Iterable[Range]) -> Iterator[tuple[list[int], list[Range]]]:
        """The buffers of shards that places lie in, one after another: (shards, these places of theirs)."""
        last, shards, found = -1, list[int](), list[Range]()
        for begin, end in ranges:
            while begin < end:
                group = int(np.searchsorted(self._ends, begin, side="right")) // self._buffer
                if group != last:
                    if found:
                        yield shards, found
                    low, high = group * self._buffer, min((group + 1) * self._buffer, len(self._ends))
                    last, shards, found = group, self.shards[low:high].tolist(), []
                stop = min(end, int(self._ends[min((group + 1) * self._buffer, len(self._ends)) - 1]))
                found.append((begin, stop))
                begin = stop
        if found:
            yield shards, found

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
        mixed = Permutation(size, rng.mix(self._seed, self._epoch, group)).at(np.arange(begin, end) - base)
        which = first + np.searchsorted(self._ends[first:last] - base, mixed, side="right")
        shard = self.shards[which]
        offset = mixed - (self._ends[which] - base - self._counts[shard])
        found: list[int] = (self._first[shard] + offset).tolist()
        return found


def _shards(count: int, seed: int, epoch: int) -> Places:
    """Shards in an order that no other epoch has."""
    return Permutation(count, rng.mix(seed, epoch, -1)).at(np.arange(count))


def _turning(count: int, seed: int, epoch: int, block: int) -> Places:
    """The order of the epoch before, backwards and shuffled within blocks; that of the first epoch is any."""
    shards = _shards(count, seed, 0)
    for one in range(1, epoch + 1):
        shards = shards[::-1]
        for begin in range(0, count, block):
            part = shards[begin : begin + block]
            shuffle = Permutation(len(part), rng.mix(seed, one, -2 - begin)).at(np.arange(len(part)))
            shards = np.concatenate([shards[:begin], part[shuffle], shards[begin + block :]])
    return shards


def places(ranges: Iterable[Range]) -> Places:
    """The numbers of some ranges, one after another."""
    rows = [np.arange(begin, end, dtype=np.int64) for begin, end in ranges]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
