# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch, and the plans of a map-style `DataLoader` and of a list: how many places an epoch has, and
which samples they hold.

An order maps places to samples: a pure function of (data, seed, epoch), alike on all workers, so that no communication
is needed. With `shuffle=True` it is a permutation that takes no memory. Any other sampler of the user's is drawn from,
by every worker from the same seed: all at once if it is finite, chunk by chunk if it is huge or endless. With a batch
sampler a place is a batch that it makes.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.core import rng
from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import ENDLESS, MOST
from paceline.data.ledger.ranges import Range
from paceline.data.sampling.batches import piece_of_rest, samples_in
from paceline.data.sampling.position import Position, set_states
from paceline.data.sampling.split import Cut, EvenAssignment, Portion, StreamedAssignment, Tail, cut_up, split_of
from paceline.errors import UnsupportedError

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


class Sequential(Drawn):
    """0, 1, 2, .. n - 1."""

    def __init__(self, n: int) -> None:
        super().__init__(range(n))


class InShards:
    """Shards of these sizes in a seeded order; the samples of every `buffer` consecutive shards are shuffled together.

    So an epoch reads a few files at a time, and neighbours in the order still come from different files.
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

    def first_samples(self, ranges: Iterable[Range]) -> Iterator[int]:
        """The first samples of all shards in every buffer that has some of the places."""
        for buffer in dict.fromkeys(buffer for buffer, _, _ in self._pieces(ranges)):
            first, last = self._shards_of(buffer)
            yield from self._first[self.shards[first:last]].tolist()

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
    """A permutation of 0 .. n (excl.), one of many, named by its key: any whole number.

    Close keys give unrelated orders, the same on every machine.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= LIMIT:
            raise ValueError(f"a permutation of {n} samples cannot be made; give 0 to 2^62")
        self.n = n
        left = max(1, math.isqrt(n))
        if left * left < n:
            left += 1
        self._left, self._right = left, max(1, -(-n // left))
        self._keys = _mixed(np.array([(key + (k + 1) * _GOLDEN) & _MASK for k in range(ROUNDS)], dtype=np.uint64))

    def __len__(self) -> int:
        return self.n

    def at(self, places: Places) -> Places:
        """The samples at these places, each 0 .. n (excl.); both of shape (m,)."""
        permuted = self._once(places.astype(np.uint64))
        while (outside := permuted >= self.n).any():
            permuted[outside] = self._once(permuted[outside])
        return permuted.astype(np.int64)

    def _once(self, x: Words) -> Words:
        left, right = np.uint64(self._left), np.uint64(self._right)
        a, b = x // right, x % right
        for k in range(0, ROUNDS, 2):
            a = _sum(a, _mixed(b ^ self._keys[k]) % left, left)
            b = _sum(b, _mixed(a ^ self._keys[k + 1]) % right, right)
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


# -- the user's own samplers ----------------------------------------------------------------------


class Drawing:
    """Iterates over a sampler with random states of its own; those of the program stay as they are.

    `items` returns the iterable; `begin` sets all generators to the state at the start; `generators` are the sampler's.
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
    """The order of a sampler too long to hold: draws on demand, and keeps the latest items; `begun` are the first."""

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
    """The order of a sampler, if it has one of this length: a list, or a :class:`StreamedOrder` if that is too long."""
    least = length if length is not None and length <= LONGEST else 0
    weight = 0

    def enough(items: list[Any]) -> bool:
        nonlocal weight
        weight += sum(len(item) if isinstance(item, (list, tuple)) else 1 for item in items[-CHUNK:])
        return weight > HELD and len(items) > least

    begun = drawing.take(enough)
    if not (weight > HELD and len(begun) > least):
        return Drawn(begun)
    return StreamedOrder(drawing, begun, length if length is not None and length > LONGEST else None)


# -- plans ----------------------------------------------------------------------------------------


class Plan:
    """What a loader's epochs consist of; places are numbered alike on all workers."""

    unit = 1  # places of a batch

    def places(self, epoch: int) -> int:
        """Their number in an epoch; `ENDLESS` if it is unknown."""
        raise NotImplementedError

    @property
    def tail(self) -> Tail:
        """What becomes of the batches of a last round that is not full."""
        raise NotImplementedError

    @property
    def most(self) -> int:
        """The most batches of a lease."""
        return MOST

    def has_piece(self, portion: Portion) -> bool:
        """Whether a worker gets a part of batches that are cut among several."""
        raise NotImplementedError

    def cut(self, places: int, workers: int) -> Cut:
        """How so many places are split."""
        return "rounds", places, self.unit, workers

    def streamed(self, epoch: int) -> StreamedOrder | None:
        """The order of an epoch if it is too long to hold; its length may be `ENDLESS`."""
        return None

    def even(
        self, position: Position, world: World, skip: int, counts: Sequence[int] = ()
    ) -> tuple[EvenAssignment, int]:
        """Split the places that remain of the present epoch evenly, or by `counts`, batches of each worker in turn, and
        note it in the position. Returns this worker's part without the `skip` batches that it has had, and how many
        places remain."""
        epoch, rest, tail = position.epoch, position.rest.get(position.epoch), self.tail
        total = self.places(epoch) if rest is None else rest.total
        stream, cut = self.streamed(epoch) if rest is None else None, self._cut(position, total, world.size)
        if counts and cut[0] == "rounds" and stream is None and tail != "pieces":
            cut = f"shares 0:{','.join(map(str, counts))}", *cut[1:]
        split, position.now.cut = split_of(cut), cut
        if stream is not None:
            return StreamedAssignment(stream.reach, epoch, split, world.rank, skip, tail), total
        return EvenAssignment(epoch, rest, split, world.rank, skip, tail), total

    def _cut(self, position: Position, total: int, workers: int) -> Cut:
        """How the present epoch is split: by the shares of its pass, or evenly."""
        cut = position.now.cut
        return cut if cut is not None and cut[0].startswith("shares") else self.cut(total, workers)

    def batches(self, position: Position, world: World) -> int | None:
        """Batches of this worker in an even split of the places that remain; None if nobody knows."""
        epoch, size, rest = position.epoch, world.size, position.rest.get(position.epoch)
        total = self.places(epoch) if rest is None else rest.total
        split = split_of(self._cut(position, total, size))
        if total >= ENDLESS // 2:
            return None
        if self.tail != "pieces" or not total % size:
            return split.batches(world.rank)
        if self.streamed(epoch) is not None:  # too long to look at its end
            return len(split)
        last = total // size * size
        places = [(last, total)] if rest is None else rest.cut(last, total)
        return len(split) - 1 + self.has_piece(Portion(epoch, places, (world.rank, size)))


class SamplingPlan(Plan):
    """Maps the places of a loader's epochs to samples.

    Args:
        seed: of the order; the same on every worker.
        workers: N if a round of N batches is one step; 1 if batches are leased.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, position: Position, workers: int = 1) -> None:
        self.loader, self._seed, self._position, self._workers = loader, seed, position, workers
        if loader.batch_size is None and loader.batch_sampler is None:
            raise UnsupportedError(
                "the loader has batch_size=None, so its samples are batches already; give it a batch_size, or share "
                "the list of batches instead"
            )
        # a place is a sample, or a batch that the user's sampler made
        self.whole = loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler
        self.unit = 1 if self.whole else int(loader.batch_size or 1)
        self._orders: dict[int, tuple[Any, Order]] = {}  # epoch -> (what the order depends on, order)
        self._looked_up: tuple[Order | None, dict[int, Any]] = None, {}  # samples of an order by their places

    @property
    def in_shards(self) -> bool:
        """Whether neighbours in the order lie in one file."""
        return not self.whole and hasattr(self.loader.dataset, "shard_sizes")

    @property
    def sampler(self) -> Any:
        """The user's sampler whose items are the places."""
        return self.loader.batch_sampler if self.whole else self.loader.sampler

    @property
    def drops_last(self) -> bool:
        """Whether every batch must be whole, so that the samples of an incomplete one are dropped."""
        return bool(getattr(self.loader.batch_sampler, "drop_last", False))

    @property
    def tail(self) -> Tail:
        return "dropped" if self.drops_last else "pieces" if self.whole else "even"

    @property
    def most(self) -> int:
        """The most batches of a lease: enough that few workers read the same buffer of shards."""
        order = self.order(self._position.epoch)
        return max(MOST, order.window // self.unit) if isinstance(order, InShards) else MOST

    @property
    def foreseen(self) -> bool:
        """Whether the data set gains from a planned order even with one worker: it prefetches, or lies in shards."""
        fetches = hasattr(self.loader.dataset, "prefetch") and type(self.sampler) is SequentialSampler
        return fetches or (_shuffles(self.sampler) and (self.in_shards or hasattr(self.loader.dataset, "prefetch")))

    def nominal(self, epoch: int) -> int:
        """Samples of a batch that the user's sampler makes."""
        return len(self.order(epoch).at([(0, 1)])[0]) if self.places(epoch) else 0

    def places(self, epoch: int) -> int:
        return self._kept(len(self.order(epoch)), self.unit)

    def streamed(self, epoch: int) -> StreamedOrder | None:
        order = self.order(epoch)
        return order if isinstance(order, StreamedOrder) else None

    def end(self, epoch: int) -> int | None:
        """The places of an epoch whose length was unknown until its sampler ended; None where it has not."""
        stream = self.streamed(epoch)
        return None if stream is None or stream.end is None else self._kept(stream.end, self.unit)

    def ids(self, portion: Portion, coming: Callable[[], Iterable[Portion]] = tuple) -> Sequence[Any]:
        """The indices of the samples of a portion; `coming` gives those that follow, to look up at the same time."""
        ids = self._at(portion, coming)
        if self.whole:
            ids = [item for batch in ids for item in batch]
        elif self.drops_last and len(ids) < portion.count:  # the sampler has ended
            ids = ids[: len(ids) // self.unit * self.unit]
        return cut_up(ids, portion.part) if portion.part is not None else ids

    def has_piece(self, portion: Portion) -> bool:
        return len(self.ids(portion)) > 0

    def _at(self, portion: Portion, coming: Callable[[], Iterable[Portion]]) -> Sequence[Any]:
        order = self.order(portion.epoch)
        if not isinstance(order, (Shuffled, InShards)):
            return order.at(portion.places)
        wanted = [place for begin, end in portion.places for place in range(begin, end)]
        looked_up_in, samples = self._looked_up
        ids = [samples.get(place) for place in wanted] if looked_up_in is order else [None]
        if None in ids:  # looking up 16 samples takes as long as 1,000
            ranges = [one for each in (portion, *coming()) if each.epoch == portion.epoch for one in each.places]
            samples = dict(zip(places(ranges).tolist(), order.at(ranges), strict=True))
            self._looked_up = order, samples
            ids = [samples[place] for place in wanted]
        return ids

    def cut(self, places: int, workers: int) -> Cut:
        kept = self._kept(places, self.unit * workers)
        return "stripes" if self.in_shards else "rounds", kept, self.unit, workers

    def _kept(self, places: int, width: int) -> int:
        """So many of the places are trained on: where batches must be whole, those that fill `width`."""
        return places // width * width if self.drops_last and places < ENDLESS else places

    # -- a pass that turns out to be an evaluation ------------------------------------------------

    def can_complete(self, workers: int) -> bool:
        """Whether every worker can compute the rest of the present epoch.

        The epoch must be whole, of known length, split in rounds, and give each worker a batch.
        """
        epoch = self._position.epoch
        if self.in_shards or self._position.others or self.streamed(epoch) is not None:
            return False
        return self.cut(self.places(epoch), workers)[1] >= workers

    def rest_of(self, epoch: int, world: World, batches: int) -> Iterator[Portion]:
        """What remains for a worker that has seen its first `batches` batches.

        First the other workers' parts of the rounds that it has begun, then the loader's own batches in order. So
        rank 0, after its first batch, continues with the loader's second.
        """
        places = self.places(epoch)
        cut = self.cut(places, world.size)
        split = split_of(cut)
        others = [rank for rank in range(world.size) if rank != world.rank]
        shares = [EvenAssignment(epoch, None, split, rank, 0, self.tail) for rank in others]
        for number in range(min(batches, len(split))):
            yield from filter(None, (share.portion(number) for share in shares))
        begin = split.part(batches, 0)[0] if batches < len(split) else cut[1]  # `drop_last` may leave out a round
        for low, high in pairwise([*range(begin, places, self.unit), places]):
            yield Portion(epoch, [(low, high)])

    # -- orders -----------------------------------------------------------------------------------

    def order(self, epoch: int) -> Order:
        """The order of an epoch; the present one and its neighbours are kept."""
        made_from = self._position.arranged.setdefault(epoch, self._workers), epoch in self._position.played
        if epoch not in self._orders or self._orders[epoch][0] != made_from:  # a checkpoint may be loaded in between
            self._orders = {one: order for one, order in self._orders.items() if abs(one - epoch) <= 1}
            self._orders[epoch] = made_from, self._make(epoch)
        return self._orders[epoch][1]

    def _make(self, epoch: int) -> Order:
        sampler = self.sampler
        if epoch in self._position.played:
            return self._played(sampler, self._position.played[epoch])
        if isinstance(sampler, SequentialSampler):
            return Sequential(len(sampler))
        if _shuffles(sampler):
            return self._shuffled(len(sampler), epoch)
        if isinstance(sampler, DistributedSampler):  # it would split (and pad) again
            count = len(sampler.dataset)  # type: ignore[arg-type]
            return self._shuffled(count, epoch) if sampler.shuffle else Sequential(count)
        return self._drawn(sampler, rng.mix(self._seed, epoch), self._position.arranged[epoch])

    def _shuffled(self, count: int, epoch: int) -> Order:
        if not self.in_shards:
            return Shuffled(count, self._seed, epoch)
        data = self.loader.dataset
        sizes: Sequence[int] = data.shard_sizes  # type: ignore[attr-defined]
        return InShards(sizes, self._seed, epoch, getattr(data, "shuffle_buffer", 8))

    def _drawn(self, sampler: Any, seed: int, workers: int) -> Order:
        """The sampler's order from `seed`; the program's generators stay as they are.

        A sampler with a method `for_workers` groups the batches of one step.
        """
        own = _generator(sampler)

        def begin() -> None:
            rng.seed_all(seed)
            if own is not None:
                own.manual_seed(seed)

        def items() -> Iterable[Any]:
            batches: Iterable[Any] = sampler.for_workers(workers) if hasattr(sampler, "for_workers") else sampler
            return batches

        return drawn(Drawing(items, begin, [own] if own is not None else []), _length(sampler))

    def _played(self, sampler: Any, start: dict[str, Any]) -> Order:
        """The order that the user's own loader gave in an epoch that began with these random states."""
        generators = generators_of(self.loader)

        def begin() -> None:
            rng.restore(start)
            set_states(generators, start["loader"])

        def items() -> Iterable[Any]:
            order: Iterable[Any] = iter(sampler) if self.whole else sampler
            # a loader's iterator asks for batches, then for its seed
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            return order

        return drawn(Drawing(items, begin, generators), _length(sampler))


class ListPlan(Plan):
    """The plan of a list of batches, or of files, each of which counts as one sample; its items are the places.

    The list keeps its order. It has a length and random access, so a worker reads only its own items, also after a
    resume and where items are leased.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        if isinstance(items, (str, bytes)):
            raise UnsupportedError(f"{items!r} is one name and no list; share a list of files, or a loader")
        self._items = items

    @property
    def tail(self) -> Tail:
        """Batches are cut, names of files are not."""
        batches = len(self._items) > 0 and not isinstance(self._items[0], (str, bytes, os.PathLike))
        return "pieces" if batches else "even"

    def places(self, epoch: int) -> int:
        return len(self._items)

    def has_piece(self, portion: Portion) -> bool:
        return self.at(portion) is not None

    def at(self, portion: Portion) -> Any:
        """The item of a place, or this worker's part of several; None if it has none."""
        items = [self._items[place] for begin, end in portion.places for place in range(begin, end)]
        if portion.part is None:
            return items[0]
        rank, workers = portion.part
        return piece_of_rest(items, workers, rank)

    def samples(self, item: Any) -> int:
        """Samples in an item; 0 if unknown."""
        return 1 if isinstance(item, (str, bytes, os.PathLike)) else samples_in(item)


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _shuffles(sampler: Any) -> bool:
    """Whether it gives every sample once in random order, as `shuffle=True` does."""
    drawn_once = type(sampler) is RandomSampler and not sampler.replacement
    return drawn_once and sampler.num_samples == len(sampler.data_source)


def _generator(sampler: Any) -> torch.Generator | None:
    owner = getattr(sampler, "sampler", sampler)  # a BatchSampler draws from the sampler within
    generator = getattr(owner, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and its samplers, each once."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = [loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())
