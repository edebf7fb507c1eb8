# SPDX-License-Identifier: Apache-2.0
"""Measures how fast each worker is, so that all end their blocks together (:mod:`paceline.rules.schedule.uneven`).

Each worker times its minibatches over several blocks. When its seconds are first known, and whenever they are another
tenth in two measurements in a row, it asks all to gather them, as for a request to tune. Each computes the same
minibatches of every worker, which hold from the next block and the next batches on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from paceline.rules.schedule import EveryBlock, uneven
from paceline.tuning.period_controller import Timer

logger = logging.getLogger("paceline")
TRIES = 8  # to deal the batches anew
APART, AGAIN = 1.1, 2
"""So much slower or faster, in so many measurements in a row."""
GAIN, ROUGH = 1.15, 1.5
"""Minibatches change where blocks then are so much faster; less is noise, and runs should repeat. ROUGH: after a first
measurement; a worker that is so much slower or faster asks after one."""
FIRST = 4
"""Minibatches of blocks before the first measurement, where longer ones are asked for: all wait for the slowest."""
Deal = Callable[[tuple[int, ...], list[Any]], bool]


class Speeds:
    """One worker's part in it.

    Args:
        timer: of blocks.
        rank, workers: this one, of so many.
        furthest: returns how far it is in its data, as a JSON value.
        deal: deals batches by the minibatches of each worker, given how far all are; whether that is possible now.

    Attributes:
        seconds: of a minibatch of each worker, by which blocks differ; empty while all are equal.
    """

    def __init__(self, timer: Timer, rank: int, workers: int, furthest: Callable[[], Any], deal: Deal) -> None:
        self._timer, self._rank, self._workers = timer, rank, workers
        self._furthest, self._deal = furthest, deal
        self.seconds: tuple[float, ...] = ()
        self._mine: float | None = None
        self._agreed: float | None = None
        self._apart, self._tries, self._fresh = 0, 0, True

    def stepped(self, blocks: int, steps: int) -> None:
        """A step was made; `blocks` have been exchanged, and this worker has made `steps` minibatches."""
        if (times := self._timer.stepped(blocks, steps)) is not None:
            self._mine = times[1]
            change = max(self._mine / self._agreed, self._agreed / self._mine) if self._agreed else ROUGH
            self._apart = 0 if change < APART else self._apart + (AGAIN if change > ROUGH else 1)

    @property
    def due(self) -> bool:
        furthest = self._furthest() if self.seconds else None
        ends = furthest is not None and furthest[-1]  # all have to make equally many minibatches
        return ends or self._apart >= (1 if self._agreed is None else AGAIN)

    def measurements(self) -> list[Any]:
        """[whether they are due, seconds of a minibatch or None, how far in the data]"""
        return [self.due, self._mine, self._furthest()]

    def agree(self, rows: Sequence[Any], schedule: EveryBlock) -> bool:
        """Whether blocks change, the same on every worker; `rows`: `measurements` of each."""
        if not any(row[0] for row in rows):
            return False
        furthest = [row[2] for row in rows]
        self._apart, equal = 0, any(one is not None and one[-1] for one in furthest)
        if equal and self.seconds:
            self._deal((), furthest)
            self.seconds = ()
            if self._rank == 0:
                logger.warning("auto: blocks are even from here on: the program calls all workers within a pass")
            return True
        if not all(row[1] for row in rows):  # a clock under which computing takes no time
            return False
        fresh, self._fresh = self._fresh, False
        seconds = tuple(float(row[1]) for row in rows)
        present = self.periods(schedule) or (schedule.period,) * len(rows)
        other = uneven.periods(seconds, schedule.period)
        self._agreed = None if fresh else seconds[self._rank]  # a first measurement is rough, and is looked at again
        if equal or uneven.gain(seconds, present, other) < (ROUGH if fresh else GAIN):
            return fresh
        if not self._deal(other, furthest):  # some are between two passes, or the data cannot be dealt
            self._tries += 1
            self._agreed = None if self._tries < TRIES else self._agreed
            return fresh
        self.seconds, self._agreed = seconds, seconds[self._rank]
        if self._rank == 0:
            logger.warning("auto: blocks end by time: %s minibatches of the workers", ", ".join(map(str, other)))
        return True

    def periods(self, schedule: EveryBlock) -> tuple[int, ...]:
        """Minibatches of each worker in a block; empty while all make as many as the rule says."""
        if self._fresh and schedule.period > 2 * FIRST:
            return (max(FIRST, schedule.fragments),) * self._workers
        return uneven.periods(self.seconds, schedule.period) if self.seconds else ()

    def state(self) -> list[Any]:
        """State for a checkpoint."""
        return [list(self.seconds), self._fresh, self._agreed]

    def load(self, state: Sequence[Any]) -> None:
        """Restore `state` of as many workers; times are measured again."""
        if len(state[0]) in (0, self._workers):
            self.seconds, self._fresh, self._agreed = tuple(state[0]), bool(state[1]), state[2]
        self._mine, self._apart = None, 0
        self._timer.restart()
