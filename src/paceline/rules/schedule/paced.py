# SPDX-License-Identifier: Apache-2.0
"""Blocks whose period follows measured times: as short as the network allows, and no shorter.

    share(tau) = e / (e + tau c)                  of the time goes into exchanging
    tau*       = ceil(e (1 - share) / (share c))  the least period that keeps it at `share`

e is what exchanging the whole model once keeps a worker, c the time of a minibatch. The period is the shortest one
times the power of four that is nearest to tau*, within two bounds: so a factor of two either way changes nothing.

Source: ours. That the best period balances the cost of an exchange against what is lost by stale models is in every
treatment of local SGD; shorter ones learn more of a minibatch, so the least is taken.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace

from paceline.core.parse import check, check_whole
from paceline.errors import RuleError
from paceline.rules.schedule.base import Probe
from paceline.rules.schedule.every_block import EveryBlock

PROBING = 1 << 30
"""The warm-up of a schedule whose probe is not over."""


def least_period(exchange_s: float, minibatch_s: float, share: float) -> int:
    """tau*, at least 1; e an exchange's, c a minibatch's seconds, above 0."""
    return max(1, math.ceil(exchange_s * (1 - share) / (share * minibatch_s) - 1e-9))


def rough(ratio: float) -> float:
    """The least 2 * 4^k that is no less.

    >>> rough(0.6), rough(1.0), rough(2.0), rough(2.1)
    (2.0, 2.0, 2.0, 8.0)
    """
    return 2.0 * 4.0 ** math.ceil(math.log(ratio / 2, 4) - 1e-9)


def simple(period: int) -> int:
    """The least power of two, or three times one, that is no less; `period` at least 1."""
    power = 1 << (period - 1).bit_length()
    return 3 * power // 4 if 3 * power // 4 >= period else power


@dataclass(frozen=True)
class Pace:
    """Which periods measured times lead to.

    Attributes:
        share: of the time that exchanges may keep a worker, above 0 and below 1.
        least: the shortest period, and that of the first blocks.
        longest: the longest period, whatever share is left with it.
    """

    share: float = 0.02
    least: int = 4
    longest: int = 64

    def __post_init__(self) -> None:
        fits = isinstance(self.share, float) and 0 < self.share < 1
        check(fits, "share", "a number above 0 and below 1, such as 0.02", self.share)
        check_whole("least", self.least, 1, "of minibatches")
        check_whole("longest", self.longest, 1, "of minibatches")
        if self.longest < self.least:
            raise RuleError(f"longest must be at least the shortest period ({self.least}), got {self.longest}")

    def bounded(self, period: int) -> int:
        """The period, or the bound that it is beyond."""
        return max(self.least, min(self.longest, period))


@dataclass(frozen=True, repr=False)
class Paced(EveryBlock):
    """Blocks of `period` minibatches at present, which measured times change.

    Attributes:
        pace: the share of the time for exchanges, and the bounds of the period.
        probe: synchronous steps before them, after which all choices of the rule are made; None for none.
    """

    pace: Pace = field(default_factory=Pace, repr=False)
    probe: Probe | None = field(default=None, repr=False)  # not in the text of a rule, which older checkpoints hold

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pace.least < self.fragments:
            raise RuleError(f"the shortest period must be at least fragments ({self.fragments}), got {self.pace.least}")

    @property
    def probing(self) -> bool:
        """Whether the probe is under way."""
        return self.warmup == PROBING

    def probed(self) -> Paced:
        """With the probe under way."""
        return replace(self, warmup=PROBING)

    @property
    def follows_times(self) -> bool:
        """Where there are two periods to choose from."""
        return self.pace.least < self.pace.longest

    def period_for(self, exchange_s: float, minibatch_s: float) -> int:
        """The period for e, seconds that exchanging the model once keeps a worker, and c, those of a minibatch."""
        if exchange_s <= 0:
            return self.pace.least
        if minibatch_s <= 0:
            return self.pace.longest
        times = rough(least_period(exchange_s, minibatch_s, self.pace.share) / self.pace.least) / 2
        return self.pace.bounded(round(self.pace.least * max(1.0, times)))

    def _shown(self) -> dict[str, object]:
        return super()._shown() | asdict(self.pace)

    def numbers(self) -> dict[str, float | int | str]:
        shown = super().numbers() | ({"warmup": self.probe.steps} if self.probe is not None and self.probing else {})
        return shown | {"share": self.pace.share, "longest": self.pace.longest}

    def describe(self, workers: int) -> str:
        pace = self.pace
        if self.probe is not None:
            text = (
                f"{self.probe.steps} timed synchronous steps, then every step where that takes {100 * pace.share:g} %, "
                f"or {pace.least} to {pace.longest} minibatches"
            )
            return text if self.grow is None else f"{text}; {self.grow.describe()}"
        return (
            f"{super().describe(workers)}; from measured times as few as keep exchanges at {100 * pace.share:g} % "
            f"of the time, {pace.least} to {pace.longest}"
        )
