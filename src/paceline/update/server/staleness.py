# SPDX-License-Identifier: Apache-2.0
"""Bounded staleness: the clock of each worker, and which workers may go on.

    a worker at clock c may start its next step iff  c - min_i c_i <= s

The minimum is over the workers that take part; a worker that is done or lost leaves it. The values that a worker reads
when it may start contain every update of clocks up to c - s - 1, and its own, because an owner answers a worker's push
with values that contain it.

Source: Q. Ho et al., NIPS 2013 (stale synchronous parallel). Earlier implementations deadlocked where finished workers
stayed in the minimum.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.rules.schedule.bounded import Bounded


class WorkerClocks:
    """The clocks of the workers, as one shard has seen them.

    Args:
        schedule: with the bound.
        workers: ranks that take part.
    """

    def __init__(self, schedule: Bounded, workers: Iterable[int]) -> None:
        self._schedule = schedule
        self._clocks = dict.fromkeys(workers, 0)
        self._idle: dict[int, int] = {}
        self._left: dict[int, int] = {}

    def sharing(self, clock: int) -> int:
        """N of a push with which its worker reaches `clock`: the workers that reach this clock, at least 1.

        Those are all that take part, and those that had reached it when they left: equal workers end one after another,
        and the last one's push still counts as one of N.
        """
        past = sum(own >= clock for own in self._left.values())
        return max(1, len(self._clocks) + len(self._idle) + past)

    @property
    def slowest(self) -> int | None:
        """The least clock; None when all workers have left."""
        return min(self._clocks.values(), default=None)

    @property
    def first(self) -> int | None:
        """The lowest rank that takes part; None when all workers have left."""
        return min([*self._clocks, *self._idle], default=None)

    def tick(self, rank: int, clock: int) -> None:
        """Note that worker `rank` has reached `clock`; clocks never go back."""
        if rank in self._idle:
            self._clocks[rank] = self._idle.pop(rank)
        if rank in self._clocks:
            self._clocks[rank] = max(self._clocks[rank], clock)
        elif rank in self._left:
            self._left[rank] = max(self._left[rank], clock)

    def leave(self, rank: int) -> None:
        """Leave worker `rank` out of the minimum: it is done or lost."""
        for there in (self._clocks, self._idle):
            if rank in there:
                self._left[rank] = there.pop(rank)

    def idle(self, rank: int) -> None:
        """Let no worker wait for worker `rank` until its next push."""
        if rank in self._clocks:
            self._idle[rank] = self._clocks.pop(rank)

    def may_start(self, rank: int) -> bool:
        """Whether worker `rank` may begin its next step."""
        slowest = self.slowest
        if slowest is None or rank not in self._clocks:
            return True
        return self._schedule.may_start(self._clocks[rank], slowest)

    def holding_up(self, rank: int) -> list[int]:
        """The workers that `rank` has to wait for."""
        own = self._clocks.get(rank, 0)
        return [other for other, clock in self._clocks.items() if not self._schedule.may_start(own, clock)]

    def state(self) -> list[list[int]]:
        """(rank, clock) pairs, for a replica or a checkpoint."""
        return [[rank, clock] for rank, clock in (self._clocks | self._idle | self._left).items()]

    def load(self, state: Iterable[Iterable[int]]) -> None:
        """Restore clocks; the workers that take part stay the same."""
        for rank, clock in state:
            self.tick(rank, clock)
