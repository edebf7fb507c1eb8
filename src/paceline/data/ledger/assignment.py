# SPDX-License-Identifier: Apache-2.0
"""What a worker is to train on next: its part of an even split, or leases from the ledger as it comes to need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, TypeVar

from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.data.ledger.ranges import Range, Ranges
from paceline.data.sampling.lookup_cache import LOOKUP_PLACES
from paceline.data.sampling.split import Rounds, Split, even_parts

Item = TypeVar("Item")


@dataclass(frozen=True)
class Portion:
    """One batch to make.

    Attributes:
        epoch: whose order its places are in.
        places: in that order; samples, or batches that a sampler made.
        part: (which, of how many) equal parts of the samples of these batches are this worker's; None for all.
    """

    epoch: int
    places: list[Range]
    part: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        """Places."""
        return sum(end - begin for begin, end in self.places)


class Assignment(Protocol):
    """Portions, one after another."""

    def next(self, wait: bool) -> Portion | None:
        """The next portion; None at the end.

        Args:
            wait: whether this worker has nothing left to do. Without it None may also mean: nothing at present.
        """

    def known(self) -> Iterable[Portion]:
        """Some of what will come next, as far as it is known without asking; several batches in one, perhaps."""

    def coming(self, batches: int) -> list[Portion]:
        """What will come next, as far as it is known: of so many batches, perhaps several in one portion."""


class EvenAssignment:
    """The worker's part of an even split.

    Args:
        epoch: of the order.
        rest: the places that are left of the epoch.
        split: of as many places.
        rank: of the worker.
        first: the round with which it begins.
        whole: whether the places are batches, of which a last, incomplete round is cut up sample by sample.
    """

    def __init__(self, epoch: int, rest: Ranges, split: Split, rank: int, first: int, whole: int = 0) -> None:
        self._epoch, self._rest, self._split, self._rank, self._whole = epoch, rest, split, rank, whole
        self._number, self._coming = first, deque[Portion]()

    def next(self, wait: bool) -> Portion | None:
        """The next portion; None at the end."""
        if not self._coming:
            self._draw()
        return self._coming.popleft() if self._coming else None

    def known(self) -> Iterable[Portion]:
        """Some of what will come next."""
        count = sum(portion.count for portion in self._coming)
        while count < LOOKUP_PLACES and self._draw():
            count += self._coming[-1].count
        return self._coming

    def coming(self, batches: int) -> list[Portion]:
        """What will come next: of so many batches."""
        while len(self._coming) < batches and self._draw():
            pass
        return list(islice(self._coming, batches))

    def _draw(self) -> bool:
        """Have one more portion at hand; whether there was one."""
        while self._number < len(self._split):
            self._number += 1
            portion = self._portion(self._number - 1)
            if portion is not None:
                self._coming.append(portion)
                return True
        return False

    def _portion(self, number: int) -> Portion | None:
        split = self._split
        if self._whole and isinstance(split, Rounds):
            begin, end = split.bounds(number)
            if end - begin < self._whole:
                return Portion(self._epoch, self._rest.cut(begin, end), (self._rank, self._whole))
        begin, end = split.part(number, self._rank)
        return Portion(self._epoch, self._rest.cut(begin, end)) if begin < end else None


class StreamedAssignment(EvenAssignment):
    """The same of places of which it turns out only in the end how many there are.

    Args:
        reach: gives how far there is something, up to a place.
    """

    def __init__(
        self, reach: Callable[[int], int], epoch: int, rest: Ranges, split: Split, rank: int, first: int, whole: int
    ) -> None:
        super().__init__(epoch, rest, split, rank, first, whole)
        self._reach = reach

    def _portion(self, number: int) -> Portion | None:
        assert isinstance(self._split, Rounds)
        begin, end = self._split.bounds(number)
        there = self._reach(end)
        if there >= end:
            return super()._portion(number)
        self._number = len(self._split)  # nothing comes behind this round
        workers = self._split.workers
        if self._whole and 0 < there - begin < workers:
            return Portion(self._epoch, [(begin, there)], (self._rank, workers))
        low, high = even_parts(max(0, there - begin), workers)[self._rank]
        return Portion(self._epoch, [(begin + low, begin + high)]) if low < high else None


class Leases(Protocol):
    """A worker's way to the ledger.

    A mark is (loader, epoch, begin, end).
    """

    def ask(self, question: Question) -> Mark | None:
        """A lease; None where there is none, and with `dry` only when the epoch is over for everybody."""

    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        """This worker ends its pass before the epoch is over; it will not do these places of its leases."""

    def ends(self, loader: int, epoch: int, total: int) -> None:
        """The loader turned out to have only so many places in this epoch."""

    def learn(self, news: Any) -> None:
        """What is done of the data, as the keeper knew when it gave the values that are taken now."""

    def done(self, marks: list[Mark]) -> None:
        """This worker has used these places for something else than a push, and has no more to push."""

    def waits(self, now: bool) -> None:
        """Whether this worker waits for the others, as at a checkpoint: its places are not to be waited for."""

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """When this epoch begins, only these places are to be done."""

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint holds of the ledger; None on workers that do not keep it."""

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""


class LeasedAssignment:
    """Leases, cut into batches.

    Args:
        leases: the way to the ledger.
        question: what is asked for: the loader, the epoch, the places of an epoch and of a batch.
        held: places that are leased already and were not begun yet; kept as it changes.
    """

    def __init__(self, leases: Leases, question: Question, held: deque[Mark]) -> None:
        self._leases, self._question, self.held = leases, question, held

    def next(self, wait: bool) -> Portion | None:
        """The next portion; with `wait`, None means that the epoch is over for everybody."""
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

    def known(self) -> Iterable[Portion]:
        """What is leased and was not begun."""
        return [Portion(epoch, [(begin, end)]) for _, epoch, begin, end in self.held]

    def coming(self, batches: int) -> list[Portion]:
        """What is leased; with too little of it, the next lease is asked for before it is needed."""
        if sum(end - begin for _, _, begin, end in self.held) < batches * self._question.unit // 2:
            lease = self._leases.ask(self._question)
            if lease is not None:
                self.held.append(lease)
        return [Portion(epoch, [(begin, end)]) for _, epoch, begin, end in self.held]


def cut_up(items: Sequence[Item], part: tuple[int, int]) -> Sequence[Item]:
    """The items of one of several parts, as even as can be."""
    low, high = even_parts(len(items), part[1])[part[0]]
    return items[low:high]
