# SPDX-License-Identifier: Apache-2.0
"""Which samples a worker trains on next: its part of an even split, or leases that it takes from the ledger.

Many places of an order are looked up at once, because numpy takes as long for 16 places as for 1,000.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, Literal, Protocol, TypeVar

from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.data.ledger.leases import Leases
from paceline.data.ledger.ranges import Range, Ranges
from paceline.data.sampling.order import Order
from paceline.data.sampling.split import Rounds, Split, even_parts

LOOKUP_PLACES = 4096
"""Places to look up at once, if the next ones are known."""


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


Item = TypeVar("Item")
Tail = Literal["even", "pieces", "dropped"]
"""What becomes of a last round that is not full, so that all workers make equally many steps.

Even: its places are cut evenly. Pieces: its places are batches, which are cut sample by sample. Dropped: none trains on
it, since batches must be whole.
"""


@dataclass(frozen=True)
class Portion:
    """One batch to make.

    Attributes:
        epoch: the epoch whose order `places` refers to.
        places: positions in that order; each is a sample, or a batch that a sampler made.
        part: (i, n) if this worker takes part i of n equal parts of the samples; None for all.
    """

    epoch: int
    places: list[Range]
    part: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        return sum(end - begin for begin, end in self.places)


class Assignment(Protocol):
    """A worker's portions of an epoch, in order."""

    def next(self, wait: bool) -> Portion | None:
        """The next portion; None at the end, and without `wait` also where none is free at present.

        Args:
            wait: whether this worker is idle until it gets a portion.
        """

    def known(self) -> Iterable[Portion]:
        """Portions that follow, as far as they are known without a lease request; one may hold several batches."""

    def coming(self, batches: int) -> list[Portion]:
        """About the next `batches` batches; this may request a lease."""


class EvenAssignment:
    """The worker's part of an even split.

    Args:
        epoch: the epoch whose order the places refer to.
        rest: the places of the epoch that remain.
        split: the split of those places.
        rank: this worker's rank.
        first: number of the first round.
        tail: what becomes of the last, incomplete round.
    """

    def __init__(self, epoch: int, rest: Ranges, split: Split, rank: int, first: int, tail: Tail = "even") -> None:
        self._epoch, self._rest, self._split, self._rank, self._tail = epoch, rest, split, rank, tail
        self._number, self._rounds, self._coming = first, len(split), deque[Portion]()

    def next(self, wait: bool) -> Portion | None:
        return self._coming.popleft() if self._coming or self._draw() else None

    def known(self) -> Iterable[Portion]:
        count = sum(portion.count for portion in self._coming)
        while count < LOOKUP_PLACES and self._draw():
            count += self._coming[-1].count
        return self._coming

    def coming(self, batches: int) -> list[Portion]:
        while len(self._coming) < batches and self._draw():
            pass
        return list(islice(self._coming, batches))

    def _draw(self) -> bool:
        """Append the next portion to `_coming`; False at the end."""
        while self._number < self._rounds:
            self._number += 1
            portion = self.portion(self._number - 1)
            if portion is not None:
                self._coming.append(portion)
                return True
        return False

    def portion(self, number: int) -> Portion | None:
        """The portion of round `number`; None if this worker has none."""
        split = self._split
        if self._tail == "pieces" and isinstance(split, Rounds):
            begin, end = split.bounds(number)
            if end - begin < split.workers:
                return Portion(self._epoch, self._rest.cut(begin, end), (self._rank, split.workers))
        begin, end = split.part(number, self._rank)
        return Portion(self._epoch, self._rest.cut(begin, end)) if begin < end else None


class StreamedAssignment(EvenAssignment):
    """An even split of an epoch whose length is unknown until its end.

    Args:
        reach: draws up to a place, and returns how many places exist up to it.
    """

    def __init__(
        self, reach: Callable[[int], int], epoch: int, rest: Ranges, split: Split, rank: int, first: int, tail: Tail
    ) -> None:
        super().__init__(epoch, rest, split, rank, first, tail)
        self._reach = reach

    def portion(self, number: int) -> Portion | None:
        assert isinstance(self._split, Rounds)
        begin, end = self._split.bounds(number)
        there = self._reach(end)
        if there >= end:
            return super().portion(number)
        self._number = len(self._split)  # the last round
        workers = self._split.workers
        if self._tail == "dropped":
            return None
        if self._tail == "pieces" and 0 < there - begin < workers:
            return Portion(self._epoch, [(begin, there)], (self._rank, workers))
        low, high = even_parts(max(0, there - begin), workers)[self._rank]
        return Portion(self._epoch, [(begin + low, begin + high)]) if low < high else None


class LeasedAssignment:
    """Leases, cut into batches.

    Args:
        leases: the connection to the ledger.
        question: the lease request to send.
        held: leased places that are not begun; updated in place.
    """

    def __init__(self, leases: Leases, question: Question, held: deque[Mark]) -> None:
        self._leases, self._question, self.held = leases, question, held

    def next(self, wait: bool) -> Portion | None:
        if not self.held:
            lease = self._leases.ask(replace(self._question, dry=wait))
            if lease is None:
                return None
            self.held.append(lease)
        loader, epoch, begin, end = self.held.popleft()
        middle = min(end, (begin // self._question.unit + 1) * self._question.unit)
        if middle < end:
            self.held.appendleft((loader, epoch, middle, end))
        return Portion(epoch, [(begin, middle)])

    def known(self) -> list[Portion]:
        return [Portion(epoch, [(begin, end)]) for _, epoch, begin, end in self.held]

    def coming(self, batches: int) -> list[Portion]:
        """What is leased; requests the next lease before this one runs out."""
        if sum(end - begin for _, _, begin, end in self.held) < batches * self._question.unit // 2:
            lease = self._leases.ask(self._question)
            if lease is not None:
                self.held.append(lease)
        return self.known()


def cut_up(items: Sequence[Item], part: tuple[int, int]) -> Sequence[Item]:
    """Part (i, n): the i-th of n parts of about equal size."""
    low, high = even_parts(len(items), part[1])[part[0]]
    return items[low:high]


def portion_of_rest(epoch: int, places: Sequence[int], workers: int, rank: int) -> Portion | None:
    """Worker `rank`'s portion of the last, incomplete round of batches at `places`, each cut among some workers."""
    for place, (low, high) in zip(places, even_parts(workers, len(places)), strict=True):
        if low <= rank < high:
            part = (rank - low, high - low) if high - low > 1 else None
            return Portion(epoch, [(place, place + 1)], part)
    return None
