# SPDX-License-Identifier: Apache-2.0
"""Asynchronous workers on the simulated clock (:class:`paceline.communication.virtual.clock.Clock`).

A worker computes a block, pushes it, and goes on: at once with overlap 1, with the answer with overlap 0. While an
answer is under way it gathers up to `hold` blocks, then it waits. An owner answers when the schedule's bound allows
(`Bounded.may_start`). The clock orders the events and carries the messages; step times are drawn here, many at once,
because a generator for each would take most of the time.

Every worker owns an equal shard, so a worker's push is one message of half of the bytes in the rule's formula, its
answer is another, and as an owner a worker sends as much as it receives.

    cycle >= tau c,    cycle >= 2 alpha + bytes / B with overlap,    tau c + 2 alpha + bytes / B without

Source: as :mod:`paceline.rules.schedule.bounded`.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np

from paceline.communication.virtual.clock import Clock
from paceline.rules.schedule import Bounded
from paceline_plugins.forecast.planner.stragglers import StepTimes

BLOCKS = 4096
"""Simulated blocks of all workers together; at least `LEAST` of each."""
LEAST = 12
DRAWN = 1024


class _Fleet:
    """N workers under one schedule."""

    def __init__(self, schedule: Bounded, steps: StepTimes, one_way_s: float, workers: int) -> None:
        self._schedule, self._workers = schedule, workers
        self._draws = _Draws(steps, schedule.period)
        self.clock = Clock(network=one_way_s)
        self.finished = [0] * workers
        self.gathered = [0] * workers
        self.asking = [False] * workers
        self.waits = [False] * workers
        self.total = 0
        self._at = {0: workers}  # clock -> workers there
        self._slowest = 0
        self._held: deque[int] = deque()

    def begin(self, rank: int) -> None:
        self.clock.wake(rank, self._draws.next(), lambda: self._computed(rank))

    def _computed(self, rank: int) -> None:
        self._at[self.finished[rank]] -= 1
        self.finished[rank] += 1
        self._at[self.finished[rank]] = self._at.get(self.finished[rank], 0) + 1
        self.total += 1
        self.gathered[rank] += 1
        if self.asking[rank]:
            self.waits[rank] = self.gathered[rank] >= self._schedule.hold
        else:
            self._push(rank)
            self.waits[rank] = not self._schedule.overlap
        if not self.waits[rank]:
            self.begin(rank)

    def _push(self, rank: int) -> None:
        self.gathered[rank], self.asking[rank] = 0, True
        owner = (rank + 1) % self._workers
        self.clock.carry(rank, owner, 0, lambda: self._arrived(rank))

    def _arrived(self, rank: int) -> None:
        self._held.append(rank)
        while not self._at.get(self._slowest):
            self._at.pop(self._slowest, None)
            self._slowest += 1
        for _ in range(len(self._held)):
            held = self._held.popleft()
            if self._schedule.may_start(self.finished[held], self._slowest):
                self.clock.carry((held + 1) % self._workers, held, 0, partial(self._answered, held))
            else:
                self._held.append(held)

    def _answered(self, rank: int) -> None:
        self.asking[rank] = False
        if not self.waits[rank]:
            return
        self.waits[rank] = False
        if self._schedule.overlap and self.gathered[rank]:
            self._push(rank)
        self.begin(rank)


class _Draws:
    """Computing times of blocks, drawn in advance, many at a time."""

    def __init__(self, steps: StepTimes, period: int) -> None:
        self._steps, self._period = steps, period
        self._generator = np.random.default_rng(period)
        self._left: list[float] = []

    def next(self) -> float:
        """Seconds of one more block."""
        if not self._left:
            drawn = self._steps.sums(self._period, (DRAWN,), self._generator)
            self._left = (drawn * (self._period * self._steps.mean_s / drawn.mean())).tolist()  # with the exact mean
        return self._left.pop()


def block_s(schedule: Bounded, steps: StepTimes, one_way_s: float, workers: int) -> float:
    """Mean seconds of a block of one worker in the steady state.

    Args:
        schedule: when workers push and for whom they wait.
        steps: the time of a minibatch.
        one_way_s: seconds of a push, and of an answer.
        workers: N, at least 2.
    """
    workers = workers if steps.variation else 2  # equal workers behave alike
    fleet = _Fleet(schedule, steps, one_way_s, workers)
    each = max(LEAST, BLOCKS // workers) if steps.variation else LEAST
    for rank in range(workers):
        fleet.begin(rank)
    began_s, began = 0.0, 0
    while fleet.total < each * workers and fleet.clock.step():
        if not began and fleet.total >= each * workers // 4:
            began_s, began = fleet.clock.now, fleet.total
    return (fleet.clock.now - began_s) * workers / (fleet.total - began)
