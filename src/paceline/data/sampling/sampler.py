# SPDX-License-Identifier: Apache-2.0
"""Plans of a map-style `DataLoader` and of a list: how many places an epoch has, and which samples they hold.

With `shuffle=True` the order is a permutation that takes no memory; every worker runs any other sampler of the user's
from the same seed, made of (seed, epoch). With a batch sampler a place is a batch that it makes.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.core import rng
from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import ENDLESS, MOST
from paceline.data.ledger.ranges import Range, Ranges
from paceline.data.sampling.batches import piece_of_rest, samples_in
from paceline.data.sampling.order import (
    Drawing,
    InShards,
    Order,
    Sequential,
    Shuffled,
    StreamedOrder,
    drawn,
    set_states,
)
from paceline.data.sampling.position import Position
from paceline.data.sampling.split import (
    Cut,
    EvenAssignment,
    Portion,
    Split,
    StreamedAssignment,
    Tail,
    cut_up,
    split_of,
)
from paceline.errors import UnsupportedError


class LookupCache:
    """The samples at some places of an order.

    Args:
        order: of an epoch.
        ranges: the places; they may overlap or touch.
    """

    def __init__(self, order: Order, ranges: Iterable[Range]) -> None:
        self.order = order
        merged = list(Ranges(ranges))
        self._ids = order.at(merged)
        self._begins = [begin for begin, _ in merged]
        self._ends = [end for _, end in merged]
        self._offsets = [0, *accumulate(end - begin for begin, end in merged)]

    def at(self, ranges: Iterable[Range]) -> list[Any] | None:
        """The samples at these places; None if one of them is not cached."""
        ids: list[Any] = []
        for begin, end in ranges:
            k = bisect_right(self._begins, begin) - 1
            if k < 0 or end > self._ends[k]:
                return None
            first = self._offsets[k] + begin - self._begins[k]
            ids += self._ids[first : first + end - begin]
        return ids


class Even(NamedTuple):
    """An even split of the places of an epoch that remain.

    Attributes:
        cut: how they are split.
        total: so many remain.
        part: this worker's.
        batches: of its part, if known.
    """

    cut: Cut
    total: int
    part: EvenAssignment
    batches: int | None


class Plan:
    """What a loader's epochs consist of; places are numbered alike on all workers.

    Attributes:
        unit: places of a batch.
    """

    unit = 1

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

    def even(self, position: Position, world: World, skip: int) -> Even:
        """Split the places that remain of the present epoch evenly, and note it in the position.

        Args:
            skip: batches that this worker has had of its part.
        """
        epoch, rest, tail = position.epoch, position.rest.get(position.epoch), self.tail
        total = self.places(epoch) if rest is None else rest.total
        cut = position.now.cut = self.cut(total, world.size)
        stream = self.streamed(epoch) if rest is None else None
        split = split_of(cut)
        if stream is not None:
            part: EvenAssignment = StreamedAssignment(stream.reach, epoch, split, world.rank, skip, tail)
        else:
            part = EvenAssignment(epoch, rest, split, world.rank, skip, tail)
        if total >= ENDLESS // 2 or (tail == "pieces" and total % world.size):
            return Even(cut, total, part, self._odd_batches(split, position, total, world))
        return Even(cut, total, part, split.batches(world.rank))

    def batches(self, position: Position, world: World) -> int | None:
        """Batches of this worker in an even split of the places that remain; None if nobody knows."""
        rest = position.rest.get(position.epoch)
        total = self.places(position.epoch) if rest is None else rest.total
        split = split_of(self.cut(total, world.size))
        if total >= ENDLESS // 2 or (self.tail == "pieces" and total % world.size):
            return self._odd_batches(split, position, total, world)
        return split.batches(world.rank)

    def _odd_batches(self, split: Split, position: Position, total: int, world: World) -> int | None:
        """The same of an epoch without an end, or whose last batches are cut among several workers."""
        epoch, size, rest = position.epoch, world.size, position.rest.get(position.epoch)
        if total >= ENDLESS // 2:
            return None
        if self.streamed(epoch) is not None:  # too long to look at its end
            return len(split)
        last = total // size * size
        places = [(last, total)] if rest is None else rest.cut(last, total)
        return len(split) - 1 + self.has_piece(Portion(epoch, places, (world.rank, size)))


class SamplingPlan(Plan):
    """Maps the places of a loader's epochs to samples.

    Args:
        loader: the user's.
        seed: of the order; the same on every worker.
        position: this worker's.
        workers: N if a round of N batches is one step; 1 if batches are leased.

    Attributes:
        whole: whether a place is a batch that the user's sampler made.
        unit: places of a batch.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, position: Position, workers: int = 1) -> None:
        self.loader, self._seed, self._position, self._workers = loader, seed, position, workers
        if loader.batch_size is None and loader.batch_sampler is None:
            raise UnsupportedError(
                "the loader has batch_size=None, so its samples are batches already; give it a batch_size, or share "
                "the list of batches instead"
            )
        self.whole = loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler
        self.unit = 1 if self.whole else int(loader.batch_size or 1)
        self._orders: dict[int, tuple[Any, Order]] = {}  # epoch -> (what the order depends on, order)
        self._lookups: LookupCache | None = None

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
        if not self.in_shards:
            return MOST
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
        count = len(self.order(epoch))
        return _multiple(count, self.unit) if self.drops_last else count

    def streamed(self, epoch: int) -> StreamedOrder | None:
        order = self.order(epoch)
        return order if isinstance(order, StreamedOrder) else None

    def end(self, epoch: int) -> int | None:
        """The places of an epoch whose length was unknown until its sampler ended; None where it has not."""
        stream = self.streamed(epoch)
        if stream is None or stream.end is None:
            return None
        return _multiple(stream.end, self.unit) if self.drops_last else stream.end

    def ids(self, portion: Portion, coming: Callable[[], Iterable[Portion]] = tuple) -> Sequence[Any]:
        """The indices of the samples of a portion.

        Args:
            portion: which places.
            coming: returns the known portions that follow, which are looked up at the same time.
        """
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
        ids = self._lookups.at(portion.places) if self._lookups is not None and self._lookups.order is order else None
        if ids is None:
            same_epoch = [one for one in coming() if one.epoch == portion.epoch]
            self._lookups = LookupCache(order, [places for one in (portion, *same_epoch) for places in one.places])
            ids = self._lookups.at(portion.places)
        assert ids is not None
        return ids

    def cut(self, places: int, workers: int) -> Cut:
        if self.drops_last:
            places = _multiple(places, self.unit * workers)
        return ("stripes" if self.in_shards else "rounds", places, self.unit, workers)

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


def _multiple(places: int, unit: int) -> int:
    """The places that fill units."""
    return places if places >= ENDLESS else places // unit * unit


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _shuffles(sampler: Any) -> bool:
    """Whether it gives every sample once in random order, as `shuffle=True` does."""
    if type(sampler) is not RandomSampler or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)


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
