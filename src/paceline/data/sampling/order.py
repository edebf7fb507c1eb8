# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch, which maps places to samples: a pure function of (data, seed, epoch), alike on all workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from paceline.core import rng
from paceline.data.ledger.ranges import Range
from paceline.data.sampling.permutation import Permutation, Places

TURNED = 2
"""With `turns`, shards are shuffled within blocks of so many buffers."""


class Order(Protocol):
    """The samples of an epoch, in order."""

    def __len__(self) -> int: ...

    def at(self, ranges: Iterable[Range]) -> Sequence[Any]:
        """The indices of the samples at these places."""


class Sequential:
    """0, 1, 2, .. n - 1."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def at(self, ranges: Iterable[Range]) -> Sequence[int]:
        return [place for begin, end in ranges for place in range(begin, end)]


class Shuffled:
    """A seeded permutation of n samples, which takes no memory."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._permutation = Permutation(n, rng.mix(seed, epoch))

    def __len__(self) -> int:
        return self._permutation.n

    def at(self, ranges: Iterable[Range]) -> Sequence[int]:
        ids: list[int] = self._permutation.at(places(ranges)).tolist()
        return ids


class Drawn:
    """The items that the user's sampler gave: indices, keys, or whole batches of them."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def at(self, ranges: Iterable[Range]) -> Sequence[Any]:
        return [item for begin, end in ranges for item in self._items[begin:end]]


class InShards:
    """Shards in a seeded order; the samples of every `buffer` consecutive shards are shuffled with each other.

    So an epoch reads a few files at a time, and neighbours in the order still come from different files.

    With `turns`, an epoch goes through the shards of the epoch before in reverse, shuffled within blocks of `TURNED`
    buffers. An LRU cache that holds c of n shards then hits c of n; if each epoch started with the first shard again,
    it would hit none.

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
        return [sample for piece in self._pieces(ranges) for sample in self._mixed(*piece)]

    @property
    def window(self) -> int:
        """Mean number of places in a buffer of shards."""
        return max(1, len(self) * min(self._buffer, len(self._counts)) // max(1, len(self._counts)))

    def first(self, shard: int) -> int:
        return int(self._first[shard])

    def windows(self, ranges: Iterable[Range]) -> Iterator[tuple[list[int], list[Range]]]:
        """Yield (shards of a buffer, the given places in it) for every buffer that has some of the places."""
        for buffer, pieces in groupby(self._pieces(ranges), key=lambda piece: piece[0]):
            first, last = self._shards_of(buffer)
            yield self.shards[first:last].tolist(), [(begin, end) for _, begin, end in pieces]

    def _pieces(self, ranges: Iterable[Range]) -> Iterator[tuple[int, int, int]]:
        """(buffer, begin, end): the ranges, cut where a buffer of shards ends."""
        for begin, end in ranges:
            while begin < end:
                buffer = int(np.searchsorted(self._ends, begin, side="right")) // self._buffer
                stop = min(end, int(self._ends[self._shards_of(buffer)[1] - 1]))
                yield buffer, begin, stop
                begin = stop

    def _shards_of(self, buffer: int) -> Range:
        """first .. last (excl.) of the order's shards."""
        return buffer * self._buffer, min((buffer + 1) * self._buffer, len(self._ends))

    def _mixed(self, buffer: int, begin: int, end: int) -> list[int]:
        """The samples at places begin .. end of a buffer."""
        first, last = self._shards_of(buffer)
        base = int(self._ends[first - 1]) if first else 0
        size = int(self._ends[last - 1]) - base
        mixed = Permutation(size, rng.mix(self._seed, self._epoch, buffer)).at(np.arange(begin, end) - base)
        which = first + np.searchsorted(self._ends[first:last] - base, mixed, side="right")
        shard = self.shards[which]
        offset = mixed - (self._ends[which] - base - self._counts[shard])
        ids: list[int] = (self._first[shard] + offset).tolist()
        return ids


def _shards(count: int, seed: int, epoch: int) -> Places:
    """The shards in the epoch's own order."""
    return Permutation(count, rng.mix(seed, epoch, -1)).at(np.arange(count))


def _turning(count: int, seed: int, epoch: int, block: int) -> Places:
    """The order of the epoch before, reversed and shuffled within blocks; epoch 0 is shuffled freely."""
    shards = _shards(count, seed, 0)
    for one in range(1, epoch + 1):
        shards = shards[::-1]
        for begin in range(0, count, block):
            part = shards[begin : begin + block]
            shuffle = Permutation(len(part), rng.mix(seed, one, -2 - begin)).at(np.arange(len(part)))
            shards = np.concatenate([shards[:begin], part[shuffle], shards[begin + block :]])
    return shards


def places(ranges: Iterable[Range]) -> Places:
    """The numbers of some ranges, concatenated."""
    rows = [np.arange(begin, end, dtype=np.int64) for begin, end in ranges]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
