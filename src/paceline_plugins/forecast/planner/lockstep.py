# SPDX-License-Identifier: Apache-2.0
"""Blocks of workers that exchange together: computing, waiting for the slowest, and the exposed exchange.

Without overlap a block of k minibatches takes  E[max_i S_i(k)] + T,  T the exchange: all begin and end it together
(Dean & Barroso, CACM 56 (2013), on stragglers).

With overlap d a worker goes on while the exchange is under way, and waits only if it has not ended d steps later.
With a_i(e) the time at which worker i begins exchange e, and D(e) the time at which it ends:

    D(e) = max(max_i a_i(e), D(e-1)) + T
    a_i(e+1) = max(a_i(e) + S_i(d), D(e)) + S_i(g - d)                 g steps from one exchange to the next, d <= g

and likewise, in the order of the steps, where several fragments are under way. The recursion is run with random step
times, over enough blocks, and its mean pace taken (max-plus; Baccelli et al., Synchronization and Linearity (1992)).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.rules.schedule import EveryBlock
from paceline_plugins.forecast.planner.stragglers import LogNormal

BLOCKS = 96
FORGOTTEN = 16
"""Blocks at the start that do not count, in which the workers spread."""


@dataclass(frozen=True)
class BlockTime:
    """Mean seconds of a block."""

    compute_s: float  # of one worker's minibatches
    wait_s: float  # for the slowest worker
    exchange_s: float  # exposed time of exchanges

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.wait_s + self.exchange_s


def barrier(steps: LogNormal, made: int, exposed_s: float, workers: int) -> BlockTime:
    """A block that ends with an exchange of `exposed_s` seconds."""
    compute_s = made * steps.mean_s
    return BlockTime(compute_s, max(0.0, steps.slowest(made, workers) - compute_s), exposed_s)


def overlapped(schedule: EveryBlock, steps: LogNormal, exchange_s: float, workers: int) -> BlockTime:
    """A block whose exchanges run during the following steps.

    Args:
        schedule: its period, fragments and overlap.
        steps: the time of a minibatch.
        exchange_s: seconds of each exchange on the wire.
        workers: N.
    """
    compute_s = schedule.period * steps.mean_s
    total_s = max(compute_s, _pace(schedule, steps, exchange_s, workers))
    alone_s = total_s
    if steps.variation:  # without stragglers
        alone_s = max(compute_s, min(total_s, _pace(schedule, LogNormal(steps.mean_s), exchange_s, 1)))
    return BlockTime(compute_s, total_s - alone_s, alone_s - compute_s)


def _pace(schedule: EveryBlock, steps: LogNormal, exchange_s: float, workers: int) -> float:
    """Mean seconds of a block, by the recursion."""
    generator = np.random.default_rng(workers)
    now = np.zeros(workers if steps.variation else 1)
    ended: dict[int, float] = {}
    free_s, step, marks, drawn_s, means = 0.0, 0, [0.0], 0.0, [0.0]
    for at, exchange, begins in _events(schedule):
        if at > step:
            sums = steps.sums(at - step, now.shape, generator)
            now, drawn_s = now + sums, drawn_s + float(sums.mean())
            step = at
        if not begins:
            now = np.maximum(now, ended.pop(exchange))
            continue
        free_s = max(float(now.max()), free_s) + exchange_s
        ended[exchange] = free_s
        if (exchange + 1) % schedule.fragments == 0:
            marks.append(float(now.mean()))
            means.append(drawn_s)
    blocks = len(marks) - 1 - FORGOTTEN
    unlucky_s = means[-1] - means[FORGOTTEN] - blocks * schedule.period * steps.mean_s  # of the draws
    return (marks[-1] - marks[FORGOTTEN] - unlucky_s) / blocks


def _events(schedule: EveryBlock) -> Iterator[tuple[int, int, bool]]:
    """(step, exchange, whether it begins or ends), in order; at a step, ends come before beginnings."""
    exchanges = BLOCKS * schedule.fragments
    begins = [(schedule.ends(e), 1, e) for e in range(exchanges)]
    lands = [(schedule.ends(e) + schedule.overlap, 0 if schedule.overlap else 2, e) for e in range(exchanges)]
    for step, turn, exchange in sorted(begins + lands):
        if step <= begins[-1][0]:
            yield step, exchange, turn == 1
