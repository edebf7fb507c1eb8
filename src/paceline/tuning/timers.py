# SPDX-License-Identifier: Apache-2.0
"""How long a minibatch and an exchange take on one worker: by the wall clock, or by the simulated one.

Under a simulated clock an exchange of B bytes from each of N workers is taken for a ring: 2 (N-1) messages, one after
another, of B / (2 (N-1)) bytes, each worker to the next. What d minibatches of overlap hide of a fragment is taken off:

    e = F max(0, r / F - d c),    r = 2 (N-1) * network(B / (2 (N-1)))

F is the number of fragments. A number is a function of the clock, the block and the step alone, so that a run which was
resumed measures what one that went on does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from paceline.communication.virtual.clock import Clock
from paceline.rules.schedule import EveryBlock

SKIPPED = 2
"""Blocks at the start that are not counted, while memory and connections are set up."""
LEAST = 4
"""The least number of blocks for a measurement."""
MOST = 64
"""Only the last so many blocks count."""


class Timer(Protocol):
    """Measures on one worker."""

    def stepped(self, blocks: int, steps: int) -> None:
        """A step was made; `blocks` have been exchanged, and this worker has made `steps` minibatches."""

    def measured(self) -> tuple[float, float] | None:
        """(seconds of exchanging the model once, seconds of a minibatch); None if unknown."""

    def restart(self) -> None:
        """Forget all measurements."""


class WallTimer:
    """By the wall clock.

    Args:
        exchanged: total seconds of waiting for other workers in exchanges of blocks, and of these exchanges; the
            monitor updates this list in place.
    """

    def __init__(self, exchanged: Sequence[float]) -> None:
        self._exchanged = exchanged
        self._rows: deque[tuple[float, float]] = deque(maxlen=MOST)
        self._skip, self._blocks = SKIPPED, -1
        self._before = [0.0, 0.0, 0.0, 0.0]

    def stepped(self, blocks: int, steps: int) -> None:
        if blocks == self._blocks:
            return
        now = [time.perf_counter(), *self._exchanged[:2], float(steps)]
        between_s, wait_s, exchange_s, made = (after - was for after, was in zip(now, self._before, strict=True))
        count, known = blocks - self._blocks, self._blocks >= 0
        self._before, self._blocks = now, blocks
        if not known:
            return
        if self._skip:
            self._skip -= 1
        elif made > 0 and count > 0:
            self._rows.append((exchange_s / count, (between_s - wait_s - exchange_s) / made))

    def measured(self) -> tuple[float, float] | None:
        if len(self._rows) < LEAST:
            return None
        return median(e for e, _ in self._rows), median(c for _, c in self._rows)

    def restart(self) -> None:
        self._rows.clear()
        self._skip, self._blocks = SKIPPED, -1


class SimulatedTimer:
    """By the simulated clock.

    Args:
        clock: the cluster's.
        schedule: the rule's.
        rank: this worker.
        workers: N.
        nbytes: that this worker sends in an exchange of the whole model.
    """

    def __init__(self, clock: Clock, schedule: EveryBlock, rank: int, workers: int, nbytes: int) -> None:
        self._clock, self._schedule, self._rank, self._workers, self._nbytes = clock, schedule, rank, workers, nbytes
        self._blocks = self._steps = 0

    def stepped(self, blocks: int, steps: int) -> None:
        self._blocks, self._steps = blocks, steps

    def measured(self) -> tuple[float, float] | None:
        """From the last minibatches and the last exchange."""
        if not self._blocks:
            return None
        steps = range(max(0, self._steps - MOST), self._steps)
        step_s = median(self._clock.compute_s(self._rank, step) for step in steps)
        parts, hidden_s = self._schedule.fragments, self._schedule.overlap * step_s
        whole_s = ring_s(self._clock, self._rank, self._workers, self._nbytes, self._blocks)
        return parts * max(0.0, whole_s / parts - hidden_s), step_s

    def restart(self) -> None:
        """There is nothing to forget."""


def ring_s(clock: Clock, rank: int, workers: int, nbytes: int, number: int) -> float:
    """r, seconds of exchange `number` of so many bytes from each of N workers."""
    rounds = 2 * (workers - 1)
    to, piece, first = (rank + 1) % workers, -(-nbytes // rounds), number * rounds
    return sum(clock.message_s(rank, to, piece, first + k) for k in range(rounds))


class NoTimer:
    """For virtual workers without a clock: the times of the one machine that runs them all mean nothing."""

    def stepped(self, blocks: int, steps: int) -> None:
        pass

    def measured(self) -> tuple[float, float] | None:
        return None

    def restart(self) -> None:
        pass
