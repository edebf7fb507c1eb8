# SPDX-License-Identifier: Apache-2.0
"""Each worker exchanges by itself, and waits for the slowest only when it is too far ahead.

    a worker at clock c may start its next block when   c - min_i c_i <= s

c counts the blocks (or minibatches, with period 1) that a worker has finished, s is the staleness, and the minimum is
over the workers that still take part: who has finished or died leaves it. s = 0 is lockstep (`EveryStep`), s = None is
free. A worker that starts at clock c has read all updates of clocks up to c - s - 1, and its own ("read my writes"):
with a finite s it waits for the answer to each push, because with the answer of the push before last it would go on
from values that do not hold its own last update.

Free workers need not wait for the network: with overlap 1 the answer has the next minibatch's time, and where it takes
longer, up to `hold` blocks of work are gathered into one push before the worker waits: gradients as their mean, because
a step of their sum, taken at one point, would be as unstable as a rate that many times as high; local steps as the
displacement that they made. A mean makes fewer steps of as many samples, so `hold` is 1 by default.

A minibatch whose gradients are inf or nan, or whose step a GradScaler skips, is a clock as well.

Source: Ho et al., NIPS 2013 (stale synchronous parallel).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.parse import check, check_whole, is_whole
from paceline.errors import RuleError
from paceline.rules.schedule.base import Schedule


@dataclass(frozen=True)
class Bounded(Schedule):
    """Blocks of `period` minibatches on each worker, at its own pace.

    Attributes:
        staleness: s, clocks that a worker may be ahead of the slowest; None for any number (free).
        period: minibatches of a block: 1 where gradients are exchanged.
        overlap: 1 waits for the answer until after the next minibatch; 0 waits for each answer, as a finite staleness
            must.
        hold: the largest number of blocks that are gathered while an answer is in flight; then the worker waits.
    """

    engine = "server"
    workers_meet = False
    compares_contributions = False  # a push is applied when it arrives
    opens_connections = True
    survives_loss = True  # the owners' backups take over
    warmup = 0
    fragments = 1

    staleness: int | None = None
    period: int = 1
    overlap: int = 1
    hold: int = 1

    def __post_init__(self) -> None:
        fits = self.staleness is None or (is_whole(self.staleness) and self.staleness >= 1)
        wanted = "None (free) or a whole number of clocks, at least 1 (lockstep is EveryStep())"
        check(fits, "staleness", wanted, self.staleness)
        check_whole("period", self.period, 1, "of minibatches")
        fits = is_whole(self.overlap) and 0 <= self.overlap <= 1
        check(fits, "overlap", "0 (wait for each answer) or 1 (go on for a minibatch)", self.overlap)
        if self.staleness is not None and self.overlap:
            raise RuleError(
                f"overlap must be 0 with a finite staleness ({self.staleness}), because a worker then reads its own "
                f"updates, got {self.overlap!r}; use overlap=0, or staleness=None"
            )
        check_whole("hold", self.hold, 1, "of blocks")

    def can_go_back(self, warm: bool) -> bool:
        """Never: workers are at different steps, and the owners have applied their pushes."""
        return False

    def may_start(self, clock: int, slowest: int) -> bool:
        """Whether a worker that has finished `clock` blocks may start one, where the slowest has finished `slowest`."""
        return self.staleness is None or clock - slowest <= self.staleness

    def numbers(self) -> dict[str, float | int | str]:
        staleness = "any" if self.staleness is None else self.staleness
        return {"period": self.period, "staleness": staleness, "overlap": self.overlap, "hold": self.hold}

    def describe(self, workers: int) -> str:
        block = "every minibatch" if self.period == 1 else f"every {self.period} minibatches"
        ahead = "free" if self.staleness is None else f"at most {self.staleness} ahead of the slowest"
        answer = "the answer a minibatch later" if self.overlap else "waits for the answer"
        return f"{block}, each worker by itself, {ahead}; {answer}"
