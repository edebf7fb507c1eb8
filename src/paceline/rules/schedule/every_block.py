# SPDX-License-Identifier: Apache-2.0
"""Exchange after every block of tau minibatches, after a synchronous warm-up; whole, or in fragments one by one.

    t <  W:  exchange gradients before every step     (warm-up: the model is not yet where averaging is harmless)
    t >= W:  fragment f of F ends its blocks after steps W + k tau + (f + 1) tau / F,     k = 0, 1, 2, ...

t counts one worker's steps, W is the warm-up, tau the period. With F = 1 the whole model is exchanged after W + tau,
W + 2 tau, ..; with more, each exchange carries one part and the peak rate falls by F. An exchange that begins after
step t is applied after step t + d, d being the overlap: meanwhile the workers go on, and the network has d steps' time.

Source: Chen & Huo, ICASSP 2016 (blocks); the need of a warm start is stated in the documentation of CNTK's block
momentum; Douillard et al., arXiv 2501.18512 (fragments with offsets, and the delay between sending and applying).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from paceline.core.parse import Checked, whole
from paceline.rules.schedule.base import Schedule
from paceline.rules.schedule.growth import GivenGrowth, Growth


@dataclass(frozen=True, repr=False)
class EveryBlock(Checked, Schedule):
    """Blocks of `period` minibatches on each worker.

    Attributes:
        period: tau, minibatches that each worker makes between two exchanges of a parameter.
        warmup: W, synchronous steps before the first block.
        fragments: F, parts of the model that are exchanged one after another, evenly over the block.
        overlap: d, minibatches that are made while an exchange is under way; 0 waits for it.
        grow: how the number of workers that train grows; None if all train that there are.
    """

    exchanges_blocks = True
    remembers_start = True
    can_be_elastic = True
    checks: ClassVar = {
        "period": whole(1, "of minibatches"),
        "warmup": whole(0, "of steps"),
        "fragments": whole(1, most="period"),
        "overlap": whole(0, "of minibatches", most="period"),
    }

    period: int = 16
    warmup: int = 0
    fragments: int = 1
    overlap: int = 0
    grow: Growth | GivenGrowth | None = field(default=None, kw_only=True)

    def can_go_back(self, warm: bool) -> bool:
        """Not in a warm-up, which has no outer state yet."""
        return not self.is_lockstep(warm)

    def exchanges_after(self, steps: int) -> int:
        """One for each step of the warm-up, then one for each fragment of a block."""
        warm = min(steps, self.warmup)
        return warm + (steps - warm) * self.fragments // self.period

    def ends(self, exchange: int) -> int:
        """After which step since the warm-up exchange number `exchange` (the first is 0) begins."""
        block, fragment = divmod(exchange, self.fragments)
        return block * self.period + (fragment + 1) * self.period // self.fragments

    def numbers(self) -> dict[str, float | int | str]:
        shown: dict[str, float | int | str] = {"period": self.period, "warmup": self.warmup}
        if self.fragments > 1 or self.overlap:
            shown |= {"fragments": self.fragments, "overlap": self.overlap}
        if self.grow is not None:
            shown |= {"first_workers": self.grow.first, "rate_exponent": self.grow.rate_exponent}
        return shown

    def describe(self, workers: int) -> str:
        text = f"every {self.period} minibatches"
        if self.fragments > 1:
            text += f", in {self.fragments} fragments one after another"
        if self.overlap:
            text += f", applied {self.overlap} minibatches later"
        text += f", after {self.warmup} synchronous steps" if self.warmup else ""
        return text if self.grow is None else f"{text}; {self.grow.describe()}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._shown().items())})"

    def _shown(self) -> dict[str, object]:
        """What its text shows; not `grow` where it is None: texts of rules from before it existed stay equal."""
        shown = [one.name for one in fields(self) if one.repr and (one.name != "grow" or self.grow is not None)]
        return {name: getattr(self, name) for name in shown}
