# SPDX-License-Identifier: Apache-2.0
"""Chooses the period from measured times, under the schedule `Paced`.

Every worker times its steps and its exchanges, by the wall clock or by the simulated one. After enough blocks it says
so in the header of its next exchange, as for a request to tune; after that exchange all workers gather all
measurements, and each computes the same period:

    e = max_i e_i,    c = median_i c_i,    tau as in :mod:`paceline.rules.schedule.paced`

e_i and c_i are medians over worker i's blocks: the slowest link, and the usual step. Waiting for slower workers counts
in neither: a longer period does not make them faster. Later looks only change a period that is clearly wrong.

Under a simulated clock an exchange of B bytes from each of N workers is taken for a ring: 2 (N-1) messages, one after
another, of B / (2 (N-1)) bytes, each worker to the next. What d minibatches of overlap hide of a fragment is taken off:

    e = F max(0, r / F - d c),    r = 2 (N-1) * network(B / (2 (N-1)))

F is the number of fragments. A number is a function of the clock, the block and the step alone, so that a run which was
resumed measures what one that went on does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from paceline.communication import Transport
from paceline.communication.virtual.clock import Clock
from paceline.core.optimizer_state import Owned, moments
from paceline.core.world import World
from paceline.rules.codec import Layout
from paceline.rules.rule import Rule
from paceline.rules.schedule import EveryBlock, Paced
from paceline.rules.traffic import bytes_per_block
from paceline.tuning.names import Changes

SKIPPED = 2
"""Blocks at the start that are not counted, while memory and connections are set up."""
LEAST = 4
"""The least number of blocks for a measurement."""
MOST = 64
"""Only the last so many blocks count."""


class Timer:
    """Measures on one worker; by itself nothing: one machine runs all virtual workers, whose times mean nothing."""

    def stepped(self, blocks: int, steps: int) -> None:
        """A step was made; `blocks` have been exchanged, and this worker has made `steps` minibatches."""

    def measured(self) -> tuple[float, float] | None:
        """(seconds of exchanging the model once, seconds of a minibatch); None if unknown."""
        return None

    def restart(self) -> None:
        """Forget all measurements."""


class WallTimer(Timer):
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


class SimulatedTimer(Timer):
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


def ring_s(clock: Clock, rank: int, workers: int, nbytes: int, number: int) -> float:
    """r, seconds of exchange `number` of so many bytes from each of N workers."""
    rounds = 2 * (workers - 1)
    to, piece, first = (rank + 1) % workers, -(-nbytes // rounds), number * rounds
    return sum(clock.message_s(rank, to, piece, first + k) for k in range(rounds))


FIRST = 8
"""Blocks before the first look."""
AGAIN = 64
"""Blocks from one look to the next."""

Measurements = tuple[bool, float, float]
"""(whether a look is due, e in seconds, c in seconds)."""


class PeriodController:
    """One worker's measurements, and the agreement on a period.

    Attributes:
        held: whether the user has set the period, which then stays.
    """

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._blocks, self._next, self._settled, self.held = 0, FIRST, False, False

    def stepped(self, blocks: int, steps: int) -> None:
        """A step was made; `blocks` have been exchanged, and this worker has made `steps` minibatches."""
        self._blocks = blocks
        self._timer.stepped(blocks, steps)

    @property
    def due(self) -> bool:
        """Whether it is time to gather the measurements."""
        return self._timely and self._timer.measured() is not None

    @property
    def _timely(self) -> bool:
        return not self.held and self._blocks >= self._next

    def measurements(self) -> Measurements | None:
        """This worker's measurements as JSON values; None before there are enough."""
        times = self._timer.measured()
        return None if times is None else (self._timely, *times)

    def agree(self, rows: Sequence[Any], schedule: Paced, blocks: int) -> tuple[Changes, str] | None:
        """(what changes, why), the same on every worker; None if the present period stays.

        Args:
            rows: `measurements` of each worker.
            schedule: at present.
            blocks: that have been exchanged.
        """
        measured = [(float(row[1]), float(row[2])) for row in rows if row]
        if self.held or not any(row[0] for row in rows if row):
            return None
        exchange_s, step_s = max(e for e, _ in measured), median(c for _, c in measured)
        period = schedule.period_for(exchange_s, step_s, self._settled)
        self._settled, self._next = True, blocks + AGAIN
        self._timer.restart()
        if period == schedule.period:
            return None
        return {"period": period}, reason(schedule, period, exchange_s, step_s)

    def renew(self) -> None:
        """The workers have changed: look again as soon as something is measured."""
        self._next = 0
        self._timer.restart()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"next": self._next, "settled": self._settled, "held": self.held}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`; times are measured again."""
        self._next, self._settled, self.held = int(state["next"]), bool(state["settled"]), bool(state["held"])
        self._timer.restart()


def block_bytes(rule: Rule, world: World, owned: Owned, buffers: int, rank: int) -> int:
    """Bytes that worker `rank` of `world` sends for one exchange of the whole model."""
    riding = 0
    for optimizer, named in owned:
        if rule.delta.resolve(optimizer) in ("average", "compensate"):
            riding += len(moments(optimizer)) * sum(p.numel() for _, p in named)
    layout = Layout.of(tuple(p.shape) for _, named in owned for _, p in named)
    return bytes_per_block(rule, world.size, layout, buffers + riding, 0, rank=rank, hosts=world.hosts)


def reason(schedule: Paced, period: int, exchange_s: float, step_s: float) -> str:
    """Why, in words: `an exchange takes 31 ms, a step 9.8 ms`."""
    text = f"an exchange takes {_seconds(exchange_s)}, a step {_seconds(step_s)}"
    left = exchange_s / (exchange_s + period * step_s)
    above = left > schedule.pace.share + 1e-9
    return f"{text}; {100 * left:.2g} % of the time is left for exchanges" if above else text


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


logger = logging.getLogger("paceline")


def period_controller_for(
    rule: Rule, transport: Transport, owned: Owned, buffers: int, exchanged: Sequence[float]
) -> PeriodController | None:
    """The controller of one of several workers; None under rules whose period does not follow measured times.

    Args:
        buffers: elements of averaged buffers.
        exchanged: as for :class:`WallTimer`.
    """
    schedule, world, cluster = rule.schedule, transport.world, transport.cluster
    if not schedule.follows_times:
        return None
    timer = Timer()
    if cluster is None:
        timer = WallTimer(exchanged)
    elif cluster.timed:
        nbytes = block_bytes(rule, world, owned, buffers, world.rank)
        timer = SimulatedTimer(cluster.clock, rule.blocks, world.rank, world.size, nbytes)
    elif world.rank == 0:
        logger.warning(
            "virtual workers have no times of their own, so the period stays at %d; "
            "simulate(.., clock=Clock(..)) gives them a clock",
            schedule.period,
        )
    return PeriodController(timer)
