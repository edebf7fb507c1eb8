# SPDX-License-Identifier: Apache-2.0
"""Watches the time of exchanges under the schedule `Paced`, and chooses the period again where that lasts.

Every worker times its steps and its exchanges, by the wall clock or by the simulated one: of several exchanges the
least, of the steps the median. It asks for a look, in the header of its next exchange as for a request to tune,

- after its first blocks, where no probe has chosen the period;
- as soon as it knows how many minibatches a pass has, where the period leaves too few blocks in it;
- where exchanges have taken at least three times as long as in its first blocks, or a third, for a minute and more.

After that exchange all workers gather all measurements, and each computes the same period, and overlap:

    e = max_i e_i,    c = median_i c_i,    and what :func:`paceline.rules.choice.hidden` makes of them

The codec stays. Waiting for slower workers counts in neither: a longer period does not make them faster.

Under a simulated clock an exchange of B bytes from each of N workers is taken for a ring: 2 (N-1) messages, one after
another, of B / (2 (N-1)) bytes, each worker to the next: e = 2 (N-1) * network(B / (2 (N-1))). It is a function of the
clock, the block and the step alone, so that a run which was resumed measures what one that went on does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from paceline.communication import Transport
from paceline.communication.virtual.clock import Clock
from paceline.rules.choice import Measured, hidden, least_known, most_minibatches
from paceline.rules.schedule import Paced
from paceline.tuning.names import Changes

SKIPPED = 2
"""Blocks at the start that are not counted, while memory and connections are set up."""
LEAST = 6
"""The number of blocks of a measurement."""
FACTOR = 3.0
LASTS_S = 60.0
"""So many times as long, or as short, for so many seconds, is another network."""

Times = tuple[float, float]
"""(e, seconds of exchanging the model once; c, seconds of a minibatch)."""


class WallTimer:
    """Measures blocks on one worker by the wall clock.

    Args:
        exchanged: total seconds that exchanges of blocks kept this worker, waiting and exchanging, and that they took,
            part of it while it computed; the monitor updates this list in place.
        skip, first, least: blocks at the start that are not counted, those of the first measurement, and of others.
    """

    def __init__(self, exchanged: Sequence[float], skip: int = SKIPPED, first: int = LEAST, least: int = LEAST) -> None:
        self._exchanged, self._first, self._least, self._later = exchanged, (skip, first), first, least
        self._rows: list[Times] = []
        self._skip, self._blocks = skip, -1
        self._before = [0.0, 0.0, 0.0, 0.0, 0.0]

    def now(self) -> float:
        return time.perf_counter()

    def stepped(self, blocks: int, steps: int) -> Times | None:
        """A step was made; `blocks` have been exchanged, and this worker has made `steps` minibatches. The times of the
        last blocks, where there are as many as a measurement has."""
        if blocks == self._blocks:
            return None
        now = [self.now(), *self._exchanged[:3], float(steps)]
        between_s, wait_s, kept_s, took_s, made = (after - was for after, was in zip(now, self._before, strict=True))
        count, known = blocks - self._blocks, self._blocks >= 0
        self._before, self._blocks = now, blocks
        if known and self._skip:
            self._skip -= 1
        elif known and made > 0 and count > 0:
            self._rows.append((took_s / count, (between_s - wait_s - kept_s) / made))
        if len(self._rows) < self._least:
            return None
        rows, self._rows, self._least = self._rows, [], self._later
        return min(e for e, _ in rows), median(c for _, c in rows)

    def restart(self) -> None:
        self._rows.clear()
        (self._skip, self._least), self._blocks = self._first, -1


class SimulatedTimer:
    """As `WallTimer`, by the simulated clock.

    Args:
        clock: the cluster's.
        rank: this worker.
        workers: N.
        nbytes: that this worker sends in an exchange of the whole model.
        first: blocks before the first measurement.
    """

    def __init__(self, clock: Clock, rank: int, workers: int, nbytes: int, first: int = SKIPPED + LEAST) -> None:
        self._least = first
        self._clock, self._rank, self._workers, self._nbytes = clock, rank, workers, nbytes
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def restart(self) -> None: ...

    def stepped(self, blocks: int, steps: int) -> Times | None:
        self._now += self._clock.compute_s(self._rank, steps)
        if blocks < self._least:
            return None
        last = range(max(1, blocks - LEAST + 1), blocks + 1), range(max(0, steps - LEAST), steps)
        return simulated(self._clock, self._rank, self._workers, self._nbytes, *last)


Timer = WallTimer | SimulatedTimer


def simulated(clock: Clock, rank: int, workers: int, nbytes: int, exchanges: range, steps: range) -> Times:
    """The times of these steps, and of these exchanges of so many bytes from each of N workers."""
    rounds = 2 * (workers - 1)
    to, piece = (rank + 1) % workers, -(-nbytes // rounds)
    rings = (range(number * rounds, (number + 1) * rounds) for number in exchanges)
    exchange_s = min(sum(clock.message_s(rank, to, piece, message) for message in ring) for ring in rings)
    return exchange_s, median(clock.compute_s(rank, step) for step in steps)


def block_timer(
    transport: Transport,
    exchanged: Sequence[float],
    nbytes: Callable[[], int],
    skip: int = SKIPPED,
    first: int = LEAST,
    least: int = LEAST,
) -> Timer | None:
    """Of blocks on this worker; None among virtual workers without a clock, whose times mean nothing."""
    world, cluster = transport.world, transport.cluster
    if cluster is None:
        return WallTimer(exchanged, skip, first, least)
    return SimulatedTimer(cluster.clock, world.rank, world.size, nbytes(), skip + first) if cluster.timed else None


class PeriodController:
    """One worker's measurements, and the agreement on a period.

    Args:
        timer: of blocks, if any.
        minibatches: returns how many this worker makes in a pass; None while it does not know.
        probed: whether a probe has chosen the rule.
        overlaps: whether the overlap follows, too.

    Attributes:
        held: whether the user has set the period, which then stays.
    """

    def __init__(
        self,
        timer: Timer | None,
        minibatches: Callable[[], int | None] = lambda: None,
        probed: bool = False,
        overlaps: bool = False,
    ) -> None:
        self._timer, self._minibatches, self._overlaps = timer, minibatches, overlaps
        self._settled = self._fitted = probed
        self._usual_s: float | None = None  # the least e of the first minute
        self._until_s: float | None = None  # the end of that minute
        self._times: Times | None = None  # the last ones
        self._since: float | None = None  # since when exchanges have taken another time
        self.held = False

    def stepped(self, blocks: int, steps: int) -> None:
        if self._timer is None or (times := self._timer.stepped(blocks, steps)) is None:
            return
        self._times, now = times, self._timer.now()
        self._until_s = now + LASTS_S if self._until_s is None else self._until_s
        if self._usual_s is None or now < self._until_s:
            self._usual_s = min(times[0], self._usual_s or times[0])
        differs = not self._usual_s / FACTOR < times[0] < self._usual_s * FACTOR
        self._since = (now if self._since is None else self._since) if differs else None

    @property
    def due(self) -> str:
        """What it is time to gather the measurements for: "times" or the "length" of a pass; empty if for nothing."""
        if self.held:
            return ""
        lasts = self._since is not None and self._timer is not None and self._timer.now() - self._since >= LASTS_S
        if lasts or (not self._settled and self._times is not None):
            return "times"
        # before the first times, they and the length are looked at together
        fits = self._fitted or not (self._settled or self._timer is None)
        return "length" if not fits and self._minibatches() is not None else ""

    def measurements(self) -> list[Any]:
        """This worker's measurements as JSON values: why they are due, e and c or None, minibatches of a pass."""
        return [self.due, *(self._times or (None, None)), self._minibatches()]

    def agree(self, rows: Sequence[Any], schedule: Paced) -> tuple[Changes, str] | None:
        """(what changes, why), the same on every worker; None if the present period stays.

        Args:
            rows: `measurements` of each worker.
            schedule: at present.
        """
        rows = [row for row in rows if row]
        if self.held or not any(row[0] for row in rows):
            return None
        timed = [row for row in rows if row[1] is not None and any(one[0] == "times" for one in rows)]
        length = least_known(row[3] for row in rows)
        period, overlap, why = schedule.period, schedule.overlap, ""
        if timed:
            times = Measured(median(row[2] for row in timed), max(row[1] for row in timed))
            period, overlap = hidden(times, 1.0, schedule, self._overlaps)
            why = f"an exchange {times.words}"
            if self._settled and self._usual_s:
                why += f", {times.exchange_s / self._usual_s:.2g} times as long as before"
        first = bool(timed) and not self._settled
        self._settled, self._fitted = self._settled or first, self._fitted or length is not None
        hides = overlap if self._overlaps else schedule.pace.least if self._settled else 0
        if (most := most_minibatches(length, hides)) < period:
            period, overlap = max(most, schedule.fragments), min(most, overlap)
            why = ", and ".join([*([why] if why else []), f"a pass has {length} minibatches"])
        if timed or period != schedule.period:  # with other blocks other times are usual
            self._usual_s = self._until_s = None
            self._restart()
        period = max(period, overlap)
        changes = {"period": period} | ({"overlap": overlap} if self._overlaps else {})
        same = (period, overlap) == (schedule.period, schedule.overlap)
        return None if same and not first else (changes, why)

    def renew(self) -> None:
        """The workers have changed, and with them their passes; the rule stays."""
        self._fitted = False
        self._restart()

    def _restart(self) -> None:
        self._times = self._since = None
        if self._timer is not None:
            self._timer.restart()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"usual": self._usual_s, "settled": self._settled, "fitted": self._fitted, "held": self.held}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`; times are measured again."""
        self._restart()
        self._settled, self.held = bool(state["settled"]), bool(state["held"])
        self._usual_s, self._fitted = state.get("usual"), bool(state.get("fitted", True))
