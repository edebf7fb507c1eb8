# SPDX-License-Identifier: Apache-2.0
"""Chooses the period from measured times, under the schedule :class:`paceline.rules.schedule.Paced`.

Every worker times its steps and its exchanges (:mod:`.timers`). After enough blocks it says so in the header of its
next exchange, as for a request to tune; after that exchange all workers gather all measurements, and each computes the
same period:

    e = max_i e_i,    c = median_i c_i,    tau as in :mod:`paceline.rules.schedule.paced`

e_i and c_i are medians over worker i's blocks: the slowest link, and the usual step. Waiting for slower workers counts
in neither: a longer period does not make them faster. Later looks only change a period that is clearly wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from paceline.core.optimizer_state import Owned, moments
from paceline.core.world import World
from paceline.rules.codec import Layout
from paceline.rules.rule import Rule
from paceline.rules.schedule import Paced
from paceline.rules.traffic import bytes_per_block
from paceline.tuning.names import Changes
from paceline.tuning.timers import Timer

FIRST = 8
"""Blocks before the first look."""
AGAIN = 64
"""Blocks from one look to the next."""

Said = tuple[bool, float, float]
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

    def said(self) -> Said | None:
        """This worker's measurements as JSON values; None before there are enough."""
        found = self._timer.measured()
        return None if found is None else (self._timely, *found)

    def agree(self, rows: Sequence[Any], schedule: Paced, blocks: int) -> tuple[Changes, str] | None:
        """(what changes, why), the same on every worker; None if the present period stays.

        Args:
            rows: `said` of each worker.
            schedule: at present.
            blocks: that have been exchanged.
        """
        found = self._together(rows)
        return None if found is None else self._follow(*found, schedule, blocks)

    def _together(self, rows: Sequence[Any]) -> tuple[float, float] | None:
        """(e, c) of all workers; None where none looks."""
        measured = [(float(row[1]), float(row[2])) for row in rows if row]
        if self.held or not any(row[0] for row in rows if row):
            return None
        return max(e for e, _ in measured), median(c for _, c in measured)

    def _follow(self, exchange_s: float, step_s: float, schedule: Paced, blocks: int) -> tuple[Changes, str] | None:
        """The period that these times want."""
        period = schedule.period_for(exchange_s, step_s, self._settled)
        self._looked(blocks)
        if period == schedule.period:
            return None
        return {"period": period}, reason(schedule, period, exchange_s, step_s)

    def _looked(self, blocks: int, until_next: int | None = None) -> None:
        self._settled, self._next = True, blocks + (AGAIN if until_next is None else until_next)
        self._timer.restart()

    def renew(self) -> None:
        """The workers have changed: look again as soon as something is measured."""
        self._next = 0
        self._timer.restart()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"next": self._next, "settled": self._settled, "held": self.held}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`; times are measured anew."""
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
    return (
        f"{text}; {100 * left:.2g} % of the time is left for exchanges" if left > schedule.pace.share + 1e-9 else text
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
