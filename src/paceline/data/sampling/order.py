# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch, which maps places to samples: a pure function of (data, seed, epoch), alike on all workers.

Orders with `shuffle=True` are permutations that take no memory. Any other sampler of the user's is drawn from: all at
once if it is finite, chunk by chunk if it is huge or endless. Every worker draws the whole order from the epoch's seed
and takes its part, so that no communication is needed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core import rng
from paceline.data.ledger.epoch_ledger import ENDLESS
from paceline.data.ledger.ranges import Range

Places = NDArray[np.int64]
Words = NDArray[np.uint64]

HELD = 1 << 20
"""An order of at most this many samples is held in memory."""
LONGEST = 1 << 26
"""A sampler with a length of at most this many items is held in memory."""
CHUNK = 1 << 10


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
        self.shards = Permutation(len(counts), rng.mix(seed, epoch, -1)).at(np.arange(len(counts)))
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


def places(ranges: Iterable[Range]) -> Places:
    """The numbers of some ranges, concatenated."""
    rows = [np.arange(begin, end, dtype=np.int64) for begin, end in ranges]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


# -- a permutation that takes no memory ----------------------------------------------------------
#
# It is computed place by place, by a generalised Feistel network over pairs. Every x < n is written as x = a' R + b',
# with sides L and R of about sqrt(n) each and L R >= n; a round adds to one half a keyed hash of the other, in turns:
#
#     a <- (a + h_k(b)) mod L        b <- (b + h_k+1(a)) mod R
#
# Each round can be undone, so the whole is a permutation of 0 .. L R. A result that is not below n goes through the
# network again (cycle walking) until it is; because L R < n + 2 sqrt(n) + 1, hardly any does.
#
# Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (the generalised Feistel cipher,
# and cycle walking). The hash is the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014). This is for
# shuffling, not for secrets.

ROUNDS = 12
LIMIT = 1 << 62
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of 0 .. n (excl.), one of many, named by its key.

    Args:
        n: number of samples, 0 .. 2^62.
        key: any whole number; close keys give unrelated orders, the same on every machine.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= LIMIT:
            raise ValueError(f"a permutation of {n} samples cannot be made; give 0 to 2^62")
        self.n = n
        left = max(1, math.isqrt(n))
        if left * left < n:
            left += 1
        self._left, self._right = left, max(1, -(-n // left))
        self._keys = [_mixed_number((key + (k + 1) * _GOLDEN) & _MASK) for k in range(ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def at(self, places: Places) -> Places:
        """The samples at these places.

        Args:
            places: int64, shape (m,), each 0 .. n (excl.).

        Returns:
            int64, shape (m,).
        """
        permuted = self._once(places.astype(np.uint64))
        while (outside := permuted >= self.n).any():
            permuted[outside] = self._once(permuted[outside])
        return permuted.astype(np.int64)

    def _once(self, x: Words) -> Words:
        left, right = np.uint64(self._left), np.uint64(self._right)
        a, b = x // right, x % right
        for k in range(0, ROUNDS, 2):
            a = _sum(a, _mixed(b ^ np.uint64(self._keys[k])) % left, left)
            b = _sum(b, _mixed(a ^ np.uint64(self._keys[k + 1])) % right, right)
        words: Words = a * right + b
        return words


def _sum(x: Words, y: Words, modulus: np.uint64) -> Words:
    """x + y modulo `modulus`, for x and y below it; what would be below 0 wraps round to more than the sum is."""
    x = x + y
    reduced: Words = np.minimum(x, x - modulus)
    return reduced


def _mixed(x: Words) -> Words:
    """The finaliser of splitmix64, element by element, modulo 2^64; made in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _mixed_number(x: int) -> int:
    """The same of one number."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


# -- the user's own samplers ----------------------------------------------------------------------


class Drawing:
    """Iterates over a sampler with random states of its own; those of the program stay as they are.

    Args:
        items: returns the iterable.
        begin: sets all generators to the state at the start.
        generators: the sampler's own.
    """

    def __init__(
        self, items: Callable[[], Iterable[Any]], begin: Callable[[], None], generators: list[torch.Generator]
    ) -> None:
        self._items, self._begin, self._generators = items, begin, generators
        self._iterator: Iterator[Any] | None = None
        self._states: tuple[dict[str, Any], list[torch.Tensor]] | None = None

    def take(self, enough: Callable[[list[Any]], bool]) -> list[Any]:
        """Draw items until `enough` of them, or to the end."""
        items: list[Any] = []
        with self._inside():
            if self._iterator is None:
                self._iterator = iter(self._items())
            while not enough(items) and (chunk := list(islice(self._iterator, CHUNK))):
                items += chunk
        return items

    def again(self) -> Drawing:
        """The same from the start."""
        return Drawing(self._items, self._begin, self._generators)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        outside = self._now()
        try:
            if self._states is None:
                self._begin()
            else:
                self._put(self._states)
            yield
            self._states = self._now()
        finally:
            self._put(outside)

    def _now(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        return rng.capture(), [generator.get_state() for generator in self._generators]

    def _put(self, states: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
        rng.restore(states[0])
        set_states(self._generators, states[1])


class StreamedOrder:
    """The order of a sampler too long to hold: draws on demand, and keeps the latest items.

    Args:
        drawing: of the sampler.
        begun: the items drawn so far.
        length: the sampler's; None if it has none.
    """

    def __init__(self, drawing: Drawing, begun: list[Any], length: int | None) -> None:
        self._drawing, self._held, self._first = drawing, begun, 0
        self._length, self._most = length, len(begun)
        self.end: int | None = None
        """Number of items, once the sampler has ended."""

    def __len__(self) -> int:
        return ENDLESS if self._length is None else self._length

    def reach(self, place: int) -> int:
        """Draw up to `place` (excl.); returns `place`, or the end if the sampler ends before."""
        missing = place - self._first - len(self._held)
        if missing > 0 and self.end is None:
            self._held += self._drawing.take(lambda items: len(items) >= missing)
            if self._first + len(self._held) < place:
                self.end = self._first + len(self._held)
        return place if self.end is None else min(place, self.end)

    def at(self, ranges: Iterable[Range]) -> list[Any]:
        """The items at these places; fewer if some lie after the end."""
        items: list[Any] = []
        for begin, end in ranges:
            if begin < self._first:  # a lost worker's places: draw again from the start
                self._drawing, self._held, self._first = self._drawing.again(), [], 0
            while begin >= self._first + 2 * self._most:
                self.reach(self._first + 2 * self._most)
                if self.end is not None and self.end <= begin:
                    break
                del self._held[: self._most]
                self._first += self._most
            self.reach(end)
            items += self._held[begin - self._first : end - self._first]
        return items


def drawn(drawing: Drawing, length: int | None) -> Order:
    """The order of a sampler: a list, or a :class:`StreamedOrder` if it is too long for one.

    Args:
        drawing: of the sampler.
        length: the sampler's; None if it has none.
    """
    least = length if length is not None and length <= LONGEST else 0
    weight = 0

    def enough(items: list[Any]) -> bool:
        nonlocal weight
        weight += sum(map(_samples, items[-CHUNK:]))
        return weight > HELD and len(items) > least

    begun = drawing.take(enough)
    if not (weight > HELD and len(begun) > least):
        return Drawn(begun)
    return StreamedOrder(drawing, begun, length if length is not None and length > LONGEST else None)


def _samples(item: Any) -> int:
    return len(item) if isinstance(item, (list, tuple)) else 1


def set_states(generators: list[torch.Generator], states: list[Tensor]) -> None:
    """Restore the states of generators."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
