# SPDX-License-Identifier: Apache-2.0
"""The even split of an epoch among a number of workers that grows during it.

A *stage* is a part of the epoch with one number of workers k: the places that remain when it begins are split among
workers 0 .. k-1 as if an epoch began. Rounds are counted through all stages, so all workers that train are in the same
round. A worker that begins later has passed over the rounds before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling.assignment import EvenAssignment, Portion, Tail
from paceline.data.sampling.split import Split

Turn = tuple[int, int]
"""(round, k): from that round on k workers train."""


@dataclass(frozen=True)
class Stage:
    """A part of an epoch with one number of workers.

    Attributes:
        first: number of its first round.
        workers: k.
        rest: the places that remained when it began.
        split: their split among k workers.
    """

    first: int
    workers: int
    rest: Ranges
    split: Split

    def done(self, rounds: Sequence[int]) -> list[tuple[int, int]]:
        """The places that are done when worker r has passed round rounds[r] of the epoch.

        Args:
            rounds: of workers 0 .. k-1.
        """
        within = [min(max(0, one - self.first), len(self.split)) for one in rounds]
        return [place for begin, end in self.split.done(within) for place in self.rest.cut(begin, end)]


def stages_of(turns: Sequence[Turn], rest: Ranges, split: Callable[[int, int], Split]) -> list[Stage]:
    """The stages of an epoch.

    Args:
        turns: where the number of workers changed.
        rest: the places of the epoch.
        split: (places, workers) -> split.
    """
    found: list[Stage] = []
    for first, workers in turns:
        if found:
            rest = rest.without(found[-1].done([first] * found[-1].workers))
        found.append(Stage(first, workers, rest, split(rest.total, workers)))
    return found


def done_in_stages(stages: Sequence[Stage], rounds: Sequence[int]) -> Ranges:
    """The places that are done when worker r has passed round rounds[r]."""
    found = Ranges()
    for stage, end in zip(stages, [*(later.first for later in stages[1:]), None], strict=True):
        mine = rounds[: stage.workers]
        for begin, last in stage.done(mine if end is None else [min(one, end) for one in mine]):
            found.add(begin, last)
    return found


class Dealt:
    """An epoch in stages, and the same epoch split among all N workers.

    Args:
        stages: in order.
        fixed: the split of the epoch among all N workers.
    """

    def __init__(self, stages: Sequence[Stage], fixed: Split) -> None:
        self.stages, self._fixed = stages, fixed
        self._begins = [stage.first for stage in stages]

    def __len__(self) -> int:
        """Rounds."""
        return self.stages[-1].first + len(self.stages[-1].split)

    def at(self, number: int) -> Stage:
        """The stage of round `number`."""
        return self.stages[max(0, bisect_right(self._begins, number) - 1)]

    def places(self, rounds: int) -> int:
        """The places in the first `rounds` rounds."""
        stage, whole = self.at(rounds), self.stages[0].rest.total
        return whole - stage.rest.total + Ranges(stage.done([rounds] * stage.workers)).total

    def share(self, rounds: int) -> float:
        """The share of the epoch's places in the first `rounds` rounds."""
        return self.places(rounds) / max(1, self.places(len(self)))

    def fixed_rounds(self, rounds: int, workers: int) -> int:
        """How many rounds of all N workers are complete where the first `rounds` rounds of this epoch are."""
        places, low, high = self.places(rounds), 0, len(self._fixed)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fixed.done([middle] * workers).total <= places else (low, middle - 1)
        return low


class DealtAssignment(EvenAssignment):
    """A worker's part of an epoch in stages.

    Args:
        epoch: the epoch whose order the places refer to.
        dealt: the stages.
        rank: this worker.
        part_of: (rank, k) -> whose part of k it takes.
        first: number of the first round.
        tail: what becomes of the last, incomplete round of a stage.
    """

    def __init__(
        self, epoch: int, dealt: Dealt, rank: int, part_of: Callable[[int, int], int], first: int, tail: Tail = "even"
    ) -> None:
        super().__init__(epoch, dealt.stages[0].rest, dealt.stages[0].split, rank, first)
        self._rounds, self._dealt = len(dealt), dealt
        self._parts = [
            EvenAssignment(epoch, one.rest, one.split, part_of(rank, one.workers), 0, tail)
            if rank < one.workers
            else None
            for one in dealt.stages
        ]

    def portion(self, number: int) -> Portion | None:
        stage = self._dealt.at(number)
        part = self._parts[self._dealt.stages.index(stage)]
        return part.portion(number - stage.first) if part is not None else None
