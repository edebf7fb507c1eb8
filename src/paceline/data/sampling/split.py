# SPDX-License-Identifier: Apache-2.0
"""Which places of an epoch a worker trains on next: its part of an even split, or leases that it takes from the ledger.

The even split is a pure function of (places, batch size, N), so that no traffic is needed.

*Rounds.* An epoch is cut into rounds. In a full round each of N workers takes one batch of b places, worker r the
places r b .. (r+1) b (excl.) of the round, so that a round holds what one worker alone would see in one batch of N b.
The remainder is neither dropped nor repeated: it becomes one more round of smaller batches of about equal size. If it
has fewer than two places for each worker (one, if b < 4), the last two rounds are cut again, so that all workers make
the same number of steps. Only if that is impossible (fewer places than workers, or batches of one) do some workers get
one batch less.

*Shares.* Where workers are of unequal speed, worker r takes n_r batches in a row of each N tau, n_r by its speed
(:mod:`paceline.rules.schedule.uneven`). A change of speeds cuts the epoch anew at a place that nobody has begun.

*Stripes.* If neighbours in the order lie in one file, worker r takes the r-th of N contiguous parts of the epoch
instead, and reads its own files.

Places are counted from the first one that was not done when the split was made: after a resume on another number of
workers the remainder is split again. A worker's k-th batch is computed, so memory does not grow with the epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Literal, Protocol, TypeVar

from paceline.data.ledger.epoch_ledger import Leases, Mark, Question
from paceline.data.ledger.ranges import Range, Ranges

Cut = tuple[str, int, int, int]
"""("rounds", "stripes", "shards", "alone" or "leased", places, batch, workers); "shares 0:1,1 640:3,5" are rounds up to
place 640, and then 3 batches of worker 0 and 5 of worker 1 in turn."""
DRAWN_PLACES = 4096
"""Places of the portions that are drawn at once, since looking up 16 samples takes as long as 1,000."""


class Rounds:
    """Rounds of N batches: `total` places, `batch` places in a full batch; without `evened`, the last is as small as in
    one worker's own loader. As of every split, `len` is the most batches that a worker has, and `done` gives the
    places that are done after worker r has done `rounds[r]` of its batches."""

    def __init__(self, total: int, batch: int, workers: int, evened: bool = True) -> None:
        self._batch, self.workers = batch, workers
        self._width = batch * workers
        self._full, rest = divmod(total, self._width)
        begin = self._full * self._width
        self._tail: list[Range] = [(begin, total)] if rest else []  # the rounds that are not full
        least = workers if batch < 4 else 2 * workers  # BatchNorm fails on a batch of one sample
        if evened and 0 < rest < least and self._full and batch >= 2:
            self._full -= 1
            begin -= self._width
            middle = begin + (self._width + rest + 1) // 2
            self._tail = [(begin, middle), (middle, total)]

    def __len__(self) -> int:
        return self._full + len(self._tail)

    def bounds(self, number: int) -> Range:
        """The places of round `number`."""
        if number < self._full:
            return number * self._width, (number + 1) * self._width
        return self._tail[number - self._full]

    def batches(self, rank: int) -> int:
        return self._full + sum(1 for k in range(self._full, len(self)) if len(range(*self.part(k, rank))))

    def part(self, number: int, rank: int) -> Range:
        begin, end = self.bounds(number)
        if number < self._full:
            return begin + rank * self._batch, begin + (rank + 1) * self._batch
        low, high = even_parts(end - begin, self.workers)[rank]
        return begin + low, begin + high

    def done(self, rounds: Sequence[int]) -> Ranges:
        rounds = [min(own, len(self)) for own in rounds]  # a loader may have given more than its length
        common = min(rounds)
        parts = [self.part(number, rank) for rank, own in enumerate(rounds) for number in range(common, own)]
        return Ranges([(0, self.bounds(common - 1)[1]), *parts] if common else parts)


class Dealt(ABC):
    """Batches of which some workers get more than others."""

    workers: int

    @abstractmethod
    def batches(self, rank: int) -> int:
        """How many worker `rank` gets."""

    @abstractmethod
    def part(self, number: int, rank: int) -> Range:
        """Worker `rank`'s places in its batch `number`; (0, 0) if it has none."""

    def __len__(self) -> int:
        return max(map(self.batches, range(self.workers)))

    def done(self, rounds: Sequence[int]) -> Ranges:
        return Ranges([self.part(number, rank) for rank, own in enumerate(rounds) for number in range(own)])


class Shares(Dealt):
    """Batches by shares: from each place of `dealt` on, worker r takes counts[r] batches in a row, in turn."""

    def __init__(self, total: int, batch: int, dealt: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        self._batch, self.workers = batch, len(dealt[0][1])
        self._runs: list[tuple[int, int, tuple[int, ...]]] = []  # begin, times that all workers take theirs, counts
        for (begin, counts), end in zip(dealt, [*(one for one, _ in dealt[1:]), total], strict=True):
            times, rest = divmod(end - begin, batch * sum(counts))
            if rest % batch and times:  # else the last batch might be of one sample
                times -= 1
            self._runs.append((begin, times, counts))
        begin += times * batch * sum(counts)
        batches = even_parts(total - begin, -(-(total - begin) // batch)) if total > begin else []
        bounds = [round(len(batches) * sum(counts[:rank]) / sum(counts)) for rank in range(len(counts) + 1)]
        self._last = [
            [(begin + low, begin + high) for low, high in batches[first:end]] for first, end in pairwise(bounds)
        ]

    def batches(self, rank: int) -> int:
        return sum(times * counts[rank] for _, times, counts in self._runs) + len(self._last[rank])

    def part(self, number: int, rank: int) -> Range:
        for begin, times, counts in self._runs:
            if number < times * counts[rank]:
                turn, offset = divmod(number, counts[rank])
                begin += (turn * sum(counts) + sum(counts[:rank]) + offset) * self._batch
                return begin, begin + self._batch
            number -= times * counts[rank]
        last = self._last[rank]
        return last[number] if number < len(last) else (0, 0)

    def next_turn(self, place: int) -> int | None:
        """The first place from `place` on at which worker 0's batches begin; None if few batches follow."""
        begin, times, counts = self._runs[-1]
        width = self._batch * sum(counts)
        turn = max(0, -(-(place - begin) // width))
        return begin + turn * width if turn < times else None


class EvenedOut(Dealt):
    """Equal shares from the middle of others on: after those they `had`, workers take the batches that each `lacks`
    beside another one, and then one in turn."""

    def __init__(self, shares: Shares, total: int, batch: int, had: Sequence[int], lacks: Sequence[int]) -> None:
        self._shares, self._had, self._lacks, self.workers = shares, had, lacks, len(had)
        self._begin = max(shares.part(one - 1, rank)[1] if one else 0 for rank, one in enumerate(had))
        self._left: list[Range] = []  # batches before that place which nobody has had
        for rank, number in enumerate(had):
            while (part := shares.part(number, rank)) < (self._begin, 0) and part[1]:
                self._left.append(part)
                number += 1
        self._batch, self._full = batch, max(0, (total - self._begin) // batch - 2 * self.workers)
        begin = self._begin + self._full * batch
        ends = even_parts(total - begin, -(-(total - begin) // batch)) if total > begin else []
        self._last = [(begin + low, begin + high) for low, high in ends]
        cut = self._last or self._left  # so that all make equally many steps
        for _ in range(
            (sum(self._lacks) - len(self._left) - self._full - len(self._last)) % self.workers if cut else 0
        ):
            at = max(range(len(cut)), key=lambda number: cut[number][1] - cut[number][0])
            begin, end = cut[at]
            cut[at : at + 1] = [(begin, (begin + end) // 2), ((begin + end) // 2, end)]

    def batches(self, rank: int) -> int:
        number, lacks = len(self._left) + self._full + len(self._last), self._lacks
        caught_up = max(0, min(lacks[rank], number - sum(lacks[:rank])))
        return self._had[rank] + caught_up + max(0, -(-(number - sum(lacks) - rank) // self.workers))

    def part(self, number: int, rank: int) -> Range:
        if number < self._had[rank]:
            return self._shares.part(number, rank)
        lacks, number = self._lacks, number - self._had[rank]
        turn = number - lacks[rank]
        number = sum(lacks[:rank]) + number if turn < 0 else sum(lacks) + turn * self.workers + rank
        if number < len(self._left):
            return self._left[number]
        number -= len(self._left)
        begin = self._begin + number * self._batch
        if number < self._full:
            return begin, begin + self._batch
        return self._last[number - self._full] if number < self._full + len(self._last) else (0, 0)


class Stripes:
    """A contiguous part for each worker, all in the same number of batches of at most `batch` places."""

    def __init__(self, total: int, batch: int, workers: int) -> None:
        self._batch = batch
        self._bounds = even_parts(total, workers)
        self._longest = -(-(self._bounds[0][1] - self._bounds[0][0]) // batch) if total else 0

    def __len__(self) -> int:
        return self._longest

    def batches(self, rank: int) -> int:
        begin, end = self._bounds[rank]
        return min(self._longest, end - begin)

    def part(self, number: int, rank: int) -> Range:
        """Worker `rank`'s places in its batch `number`; the last two batches are of about equal size."""
        begin, end = self._bounds[rank]
        full = max(0, self._longest - 2)
        if number < full:
            return begin + number * self._batch, begin + (number + 1) * self._batch
        last = self._longest - full
        low, high = even_parts(end - begin - full * self._batch, last)[number - full]
        return begin + full * self._batch + low, begin + full * self._batch + high

    def done(self, rounds: Sequence[int]) -> Ranges:
        return Ranges([(self._bounds[rank][0], self.part(own - 1, rank)[1]) for rank, own in enumerate(rounds) if own])


def even_parts(count: int, parts: int) -> list[Range]:
    """Cut 0 .. count into `parts` ranges whose sizes differ by at most one, the longer first."""
    small, longer = divmod(count, parts)
    return list(pairwise(part * small + min(part, longer) for part in range(parts + 1)))


Split = Rounds | Shares | EvenedOut | Stripes


def split_of(cut: Cut) -> Split:
    """The split that a cut describes."""
    kind, total, batch, workers = cut
    if kind.startswith("shares"):
        runs = [one.partition(":") for one in kind.split()[1:]]
        dealt = [(at, tuple(map(int, counts.split(",")))) for at, _, counts in runs]
        shares = Shares(total, batch, [(int(at), counts) for at, counts in dealt if at.isdecimal()])
        ends = [counts for at, counts in dealt if not at.isdecimal()]
        return EvenedOut(shares, total, batch, *ends) if ends else shares
    return Stripes(total, batch, workers) if kind == "stripes" else Rounds(total, batch, workers, kind != "alone")


# -- what a worker gets of it --------------------------------------------------------------------

Item = TypeVar("Item")
Tail = Literal["even", "pieces", "dropped"]
"""What becomes of a last round that is not full, so that all workers make equally many steps.

Even: its places are cut evenly. Pieces: its places are batches, which are cut sample by sample. Dropped: none trains on
it, since batches must be whole.
"""


@dataclass(frozen=True)
class Portion:
    """One batch to make."""

    epoch: int  # whose order `places` refers to
    places: list[Range]  # positions in that order; each is a sample, or a batch that a sampler made
    part: tuple[int, int] | None = None  # (i, n): this worker takes part i of n equal parts of the samples; None: all

    @property
    def count(self) -> int:
        return sum(end - begin for begin, end in self.places)


class Assignment(Protocol):
    """A worker's portions of an epoch, in order."""

    def next(self, wait: bool) -> Portion | None:
        """The next portion; None at the end, and unless this worker is idle until it gets one (`wait`), also where none
        is free at present."""

    def known(self) -> Iterable[Portion]:
        """Portions that follow, as far as they are known without a lease request; one may hold several batches."""

    def coming(self, batches: int) -> list[Portion]:
        """About the next `batches` batches; this may request a lease."""


class EvenAssignment:
    """The worker's part of an even split, from round number `first`.

    The split is that of the places of the epoch that remain (`rest`), of which the n-th is place n if `rest` is None.
    """

    ahead = DRAWN_PLACES

    def __init__(
        self, epoch: int, rest: Ranges | None, split: Split, rank: int, first: int, tail: Tail = "even"
    ) -> None:
        self._epoch, self._rest, self._split, self._rank, self._tail = epoch, rest, split, rank, tail
        self._number, self._rounds, self._coming = first, len(split), deque[Portion]()
        self.given = first

    def next(self, wait: bool) -> Portion | None:
        if not self._coming and not self._draw():
            return None
        self.given += 1
        return self._coming.popleft()

    @property
    def furthest(self) -> int:
        """The end of the last place that this worker was given, or 0."""
        return self._split.part(self.given - 1, self._rank)[1] if self.given else 0

    def deal(self, split: Split) -> None:
        """Continue with a split that is the same up to what this worker was given."""
        self._split, self._number, self._rounds, self._coming = split, self.given, len(split), deque()

    def known(self) -> Iterable[Portion]:
        if not self._coming:
            self._draw()
        return self._coming

    def coming(self, batches: int) -> list[Portion]:
        while len(self._coming) < batches and self._draw():
            pass
        return list(islice(self._coming, batches))

    def _draw(self) -> bool:
        """Append the next portions to `_coming`; False at the end."""
        count = 0
        while self._number < self._rounds and count < self.ahead:
            self._number += 1
            portion = self.portion(self._number - 1)
            if portion is not None:
                self._coming.append(portion)
                count += portion.count
        return count > 0

    def portion(self, number: int) -> Portion | None:
        """The portion of round `number`; None if this worker has none."""
        split = self._split
        begin, end = split.part(number, self._rank)
        part = None
        if self._tail == "pieces" and isinstance(split, Rounds):
            low, high = split.bounds(number)
            if high - low < split.workers:
                begin, end, part = low, high, (self._rank, split.workers)
        if begin >= end:
            return None
        return Portion(self._epoch, [(begin, end)] if self._rest is None else self._rest.cut(begin, end), part)


class StreamedAssignment(EvenAssignment):
    """An even split of an epoch whose length is unknown until its end.

    `reach` draws up to a place, and returns how many places exist up to it.
    """

    ahead = 1

    def __init__(
        self, reach: Callable[[int], int], epoch: int, split: Split, rank: int, first: int, tail: Tail
    ) -> None:
        super().__init__(epoch, None, split, rank, first, tail)
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
    """Leases, cut into batches; `held` are leased places that are not begun, updated in place."""

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

    def ends(self, epoch: int, total: int) -> None:
        """A leased place is empty: the epoch turned out to have only `total` places."""
        self.held.clear()
        self._leases.ends(self._question.loader, epoch, total)

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
