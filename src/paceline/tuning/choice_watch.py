# SPDX-License-Identifier: Apache-2.0
"""Finds out that the network, or the computing, is no longer what the rule was chosen for; for the recipe `auto`.

Every worker times windows (:mod:`.watch_timers`). Synchronous steps have become too slow where

    x > 2 x_most,    x_most = c share / (1 - share), up to which they are chosen

and blocks were chosen for another network where

    q = (r / r_0) / (c / c_0)  >= 1.5  or  <= 1 / 1.5

r_0 and c_0 are those of the first window after the choice: so what a window measures otherwise than the probe did
cancels. A worker that finds so in enough windows in a row (`PATIENCE`) says so in the header of its next exchange, and
all gather all windows: x is the greatest, r the least, c the median. If the workers together find the same, and another
choice would come out of the probe's times with exchanges r / r_0 times and computing c / c_0 times as long, they probe
again. A probe that chooses the same as before doubles the patience, up to `MOST`; another choice puts it back.

So noise does not make a run flap: x has to double where it was at the limit, and q to change by half; in two windows in
a row; on all workers together; and a mistake costs one probe, then one in four windows, one in eight, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.rules.choice import in_seconds
from paceline.tuning.watch_timers import WatchTimer, Window

CHANGED = 1.5
"""The least change of q that counts, either way."""
LIMIT = 2.0
"""Synchronous steps are left at so many times the exposed time up to which they are chosen."""
PATIENCE, MOST = 2, 64
"""Windows in a row, at first and at most."""


@dataclass(frozen=True)
class Moved:
    """How times have changed since the choice, the same on all workers.

    Attributes:
        exchange: r / r_0; for synchronous steps meaningless.
        step: c / c_0; for synchronous steps meaningless.
        why: in words.
    """

    exchange: float
    step: float
    why: str


class ChoiceWatch:
    """One worker's windows while a choice holds, and what all find together.

    Args:
        timer: measures.
        lockstep: whether synchronous steps were chosen.
        share: of the time that exchanges may keep a worker.
        patience: windows in a row.
    """

    def __init__(self, timer: WatchTimer, lockstep: bool, share: float, patience: int = PATIENCE) -> None:
        self._timer, self._lockstep, self._share, self._patience = timer, lockstep, share, patience
        self._first: Window | None = None
        self._last: Window | None = None
        self._in_a_row = 0

    def stepped(self, blocks: int, steps: int) -> None:
        """A step was made; `blocks` have been exchanged, and this worker has made `steps`."""
        found = self._timer.stepped(blocks, steps)
        if found is None:
            return
        if self._first is None:
            self._first = found
        self._last = found
        self._in_a_row = self._in_a_row + 1 if self._moved([[True, *found, *self._first]]) is not None else 0

    @property
    def samples(self) -> bool:
        """Whether the next step is synchronous and belongs to a window."""
        return self._timer.samples

    @property
    def due(self) -> bool:
        """Whether it is time to gather the windows."""
        return self._in_a_row >= self._patience

    def said(self) -> list[Any] | None:
        """This worker's windows as JSON values; None before there is one."""
        return None if self._last is None or self._first is None else [self.due, *self._last, *self._first]

    def agree(self, rows: Sequence[Any]) -> Moved | None:
        """What has changed, the same on every worker; None if nothing has. `rows`: `said` of each worker."""
        known = [row for row in rows if row]
        if not any(row[0] for row in known):
            return None
        if self.due:
            self._in_a_row = 0
        return self._moved(known)

    def _moved(self, rows: Sequence[Sequence[Any]]) -> Moved | None:
        step_s = median(float(row[2]) for row in rows)
        if self._lockstep:
            exposed_s, most = max(float(row[1]) for row in rows), LIMIT * self._share * step_s / (1 - self._share)
            if exposed_s <= most:
                return None
            why = f"exchanging gradients keeps a worker for {in_seconds(exposed_s)} beside {in_seconds(step_s)} of"
            return Moved(1.0, 1.0, f"{why} computing ({LIMIT:g} times the limit is {in_seconds(most)})")
        exchange = _ratio(min(float(row[1]) for row in rows), min(float(row[3]) for row in rows))
        step = _ratio(step_s, median(float(row[4]) for row in rows))
        if step <= 0 or 1 / CHANGED < exchange / step < CHANGED:
            return None
        told = f"an exchange takes {exchange:.3g} times as long as after the last choice"
        slower = abs(step - 1) > 0.1
        return Moved(exchange, step, f"{told}, computing {step:.3g} times" if slower else told)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"first": self._first, "last": self._last, "in_a_row": self._in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; the present window begins anew."""
        first, last = state["first"], state["last"]
        self._first = (float(first[0]), float(first[1])) if first is not None else None
        self._last = (float(last[0]), float(last[1])) if last is not None else None
        self._in_a_row = int(state["in_a_row"])


def _ratio(now: float, before: float) -> float:
    """now / before; 1 where there is nothing to compare with."""
    return now / before if before > 0 else 1.0
