# SPDX-License-Identifier: Apache-2.0
"""The split of an epoch over workers: a pure function of (places, batch size, N), so that no traffic is needed.

*Rounds.* An epoch is cut into rounds. In a full round each of N workers takes one batch of b places, worker r the
places r b .. (r+1) b (excl.) of the round, so that a round holds what one worker alone would see in one batch of N b.
The remainder is neither dropped nor repeated: it becomes one more round of smaller batches of about equal size. If it
has fewer than two places for each worker (one, if b < 4), the last two rounds are cut again, so that all workers make
the same number of steps. Only if that is impossible (fewer places than workers, or batches of one) do some workers get
one batch less.

*Stripes.* If neighbours in the order lie in one file, worker r takes the r-th of N contiguous parts of the epoch
instead, and reads its own files.

Places are counted from the first one that was not done when the split was made: after a resume on another number of
workers the remainder is split again. A worker's k-th batch is computed, so memory does not grow with the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from paceline.data.ledger.ranges import Range, Ranges


class Split(Protocol):
    """The split of an epoch over workers."""

    def __len__(self) -> int:
        """Rounds, that is, the most batches that a worker has."""

    def batches(self, rank: int) -> int:
        """Batches of worker `rank`."""

    def part(self, number: int, rank: int) -> Range:
        """Worker `rank`'s places in round `number`; may be empty."""

    def done(self, rounds: Sequence[int]) -> Ranges:
        """The places that are done after worker r has done its part of `rounds[r]` rounds."""


class Rounds:
    """Rounds of N batches: `total` places, `batch` places in a full batch."""

    def __init__(self, total: int, batch: int, workers: int) -> None:
        self._total, self._batch, self.workers = total, batch, workers
        self._width = batch * workers
        self._full, rest = divmod(total, self._width)
        self._tail: list[Range] = []  # the rounds that are not full
        if rest:
            self._tail = self._cut_tail(rest)

    def _cut_tail(self, rest: int) -> list[Range]:
        # BatchNorm fails on a batch of one sample
        least = self.workers if self._batch < 4 else 2 * self.workers
        begin = self._full * self._width
        if rest < least and self._full and self._batch >= 2:
            self._full -= 1
            begin -= self._width
            middle = begin + (self._width + rest + 1) // 2
            return [(begin, middle), (middle, self._total)]
        return [(begin, self._total)]

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
        common = min(rounds)
        ranges = Ranges([(0, self.bounds(common - 1)[1])] if common else [])
        for rank, own in enumerate(rounds):
            for number in range(common, own):
                ranges.add(*self.part(number, rank))
        return ranges


class SingleWorker:
    """One worker, whose own loader makes the batches: all full but the last."""

    def __init__(self, total: int, batch: int) -> None:
        self._total, self._batch = total, batch

    def __len__(self) -> int:
        return -(-self._total // self._batch)

    def batches(self, rank: int) -> int:
        return len(self)

    def part(self, number: int, rank: int) -> Range:
        return number * self._batch, min(self._total, (number + 1) * self._batch)

    def done(self, rounds: Sequence[int]) -> Ranges:
        return Ranges([(0, min(self._total, rounds[0] * self._batch))])


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
        ranges = Ranges()
        for rank, own in enumerate(rounds):
            if own:
                ranges.add(self._bounds[rank][0], self.part(own - 1, rank)[1])
        return ranges


def even_parts(count: int, parts: int) -> list[Range]:
    """Cut 0 .. count into `parts` ranges whose sizes differ by at most one, the longer first."""
    small, longer = divmod(count, parts)
    return list(pairwise(part * small + min(part, longer) for part in range(parts + 1)))


def split_of(cut: tuple[str, int, int, int]) -> Split:
    """The split of a :data:`~paceline.data.sampling.position.Cut`."""
    kind, total, batch, workers = cut
    if kind == "alone":
        return SingleWorker(total, batch)
    return Stripes(total, batch, workers) if kind == "stripes" else Rounds(total, batch, workers)
