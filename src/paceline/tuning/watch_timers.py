# SPDX-License-Identifier: Apache-2.0
"""How long exchanges take on one worker while a choice holds, window by window: by the wall clock or the simulated one.

Where synchronous steps were chosen, a window is the last 32 of each 96 steps, and its numbers are

    x = median seconds that a step's exchange keeps the worker,    c = median seconds of computing a step

where blocks were chosen, it is two blocks, and its numbers are

    r = least seconds of an exchange,    c = least seconds of computing a minibatch

(blocks are long, and what disturbs an exchange makes it longer, never shorter than the network allows).

Under overlap r runs from the beginning of an exchange until all of it has arrived, in the background: so a network that
becomes faster is seen as well. It holds the waiting for other workers, which is why the least r of all workers counts.
(Without a thread in the background, as with NCCL, all has arrived when the worker asks for it, and only a slower
network is seen.)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Protocol

from paceline.communication.virtual.clock import Clock
from paceline.tuning.probe_timers import exposed_s
from paceline.tuning.timers import ring_s

STEPS, EVERY = 32, 96
"""Steps of a window, and from one window's end to the next, where steps are synchronous."""
BLOCKS = 2
"""Blocks of a window."""
SKIPPED = 2
"""Blocks that are not counted after a choice, while memory and connections are set up."""
SIMULATED = 24
"""Steps of a window of blocks under a simulated clock."""

Window = tuple[float, float]
"""(x or r, c), seconds."""


class WatchTimer(Protocol):
    """Measures on one worker."""

    def stepped(self, blocks: int, steps: int) -> Window | None:
        """A step was made; `blocks` have been exchanged, and this worker has made `steps`. A window that is over."""

    @property
    def samples(self) -> bool:
        """Whether the next step is synchronous and belongs to a window."""


class WallStepsWatch:
    """Synchronous steps, by the wall clock.

    Args:
        spent: total seconds of computing, of waiting for other workers, and of exchanging; updated in place.
    """

    def __init__(self, spent: Sequence[float]) -> None:
        self._spent, self._before = spent, list(spent)
        self._rows: list[Window] = []
        self.samples = False

    def stepped(self, blocks: int, steps: int) -> Window | None:
        now = list(self._spent)
        if self.samples:
            self._rows.append((now[2] - self._before[2], now[0] - self._before[0]))
        self._before, self.samples = now, steps % EVERY >= EVERY - STEPS
        if self.samples or len(self._rows) < STEPS // 2:
            return None
        rows, self._rows = self._rows, []
        return median(e for e, _ in rows), median(c for _, c in rows)


class WallBlocksWatch:
    """Blocks, by the wall clock.

    Args:
        spent: as for :class:`WallStepsWatch`.
        flights: total seconds that exchanges of blocks were under way, and their number; updated in place.
    """

    samples = False

    def __init__(self, spent: Sequence[float], flights: Sequence[float]) -> None:
        self._spent, self._flights = spent, flights
        self._rows: list[Window] = []
        self._skip, self._blocks = SKIPPED, -1
        self._before = [0.0, 0.0, 0.0, 0.0]

    def stepped(self, blocks: int, steps: int) -> Window | None:
        if blocks == self._blocks:
            return None
        now = [self._spent[0], *self._flights, float(steps)]
        computed_s, flown_s, count, made = (after - was for after, was in zip(now, self._before, strict=True))
        known, self._before, self._blocks = self._blocks >= 0, now, blocks
        if known and self._skip:
            self._skip -= 1
        elif known and made > 0 and count > 0:
            self._rows.append((flown_s / count, computed_s / made))
        if len(self._rows) < BLOCKS:
            return None
        rows, self._rows = self._rows, []
        return min(e for e, _ in rows), min(c for _, c in rows)


class SimulatedWatch:
    """Either, by the simulated clock: a function of the clock and of the count of steps alone.

    Args:
        clock: the cluster's.
        rank: this worker.
        workers: N.
        nbytes: that this worker sends in an exchange.
        chunks: of an exchange of gradients; None for blocks.
    """

    samples = False

    def __init__(self, clock: Clock, rank: int, workers: int, nbytes: int, chunks: int | None) -> None:
        self._clock, self._rank, self._workers, self._nbytes, self._chunks = clock, rank, workers, nbytes, chunks

    def stepped(self, blocks: int, steps: int) -> Window | None:
        every, count = (SIMULATED, SIMULATED) if self._chunks is None else (EVERY, STEPS)
        if steps % every:
            return None
        step_s = median(self._clock.compute_s(self._rank, step) for step in range(steps - count, steps))
        whole_s = ring_s(self._clock, self._rank, self._workers, self._nbytes, steps)
        return (whole_s if self._chunks is None else exposed_s(whole_s, self._chunks, step_s)), step_s
