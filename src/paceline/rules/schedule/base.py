# SPDX-License-Identifier: Apache-2.0
"""The base class of schedules.

The code that runs a rule asks for a schedule's properties, not for its class. The defaults are those of workers that
exchange gradients together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from paceline.core.parse import check, is_number, is_whole
from paceline.rules.schedule.growth import GivenGrowth, Growth

LEAST_PROBE = 4
"""Of either half of a probe the first step is not counted, while connections are set up."""


@dataclass(frozen=True)
class Probe:
    """Synchronous steps at the beginning, whose times choose the rule (:mod:`paceline.rules.choice`).

    Attributes:
        steps: of the probe; in the first half gradients are exchanged after the backward pass, then during it.
        codec: whether the codec is chosen, too.
        overlap: whether the overlap is chosen, too.
        rate: s, where synchronous steps have N^s times the learning rate of one worker; None follows the optimizer.
    """

    steps: int = 6
    codec: bool = True
    overlap: bool = True
    rate: float | None = None

    def __post_init__(self) -> None:
        fits = is_whole(self.steps) and self.steps >= LEAST_PROBE
        check(fits, "probe", f"0 (begin with blocks) or a whole number of steps, at least {LEAST_PROBE}", self.steps)
        fits = self.rate is None or (is_number(self.rate) and 0 <= self.rate <= 1)
        check(fits, "sync_rate", "a number from 0 to 1, the exponent of N", self.rate)


class Schedule(ABC):
    """When workers exchange."""

    # -- its numbers ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def period(self) -> int:
        """Minibatches of a block on each worker; 1 if every minibatch is exchanged."""

    @property
    @abstractmethod
    def warmup(self) -> int:
        """Synchronous steps before the first block."""

    @property
    @abstractmethod
    def fragments(self) -> int:
        """Parts of the model that are exchanged one after another."""

    @property
    @abstractmethod
    def overlap(self) -> int:
        """Minibatches that a worker makes during an exchange."""

    @abstractmethod
    def numbers(self) -> dict[str, float | int | str]:
        """Its numbers by name, for `paceline explain`."""

    @abstractmethod
    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""

    # -- which workers exchange ---------------------------------------------------------------------------

    engine = "collective"
    """The engine: "collective", if all workers take part in each exchange, or "server", if each worker exchanges with
    the owners of the shards."""

    workers_meet = True
    """Whether all workers take part in each exchange: there they agree on changes, and stand at the same step."""

    compares_contributions = True
    """Whether all contributions to an exchange are compared, so that a guard can find outliers."""

    opens_connections = False
    """Whether workers open connections besides the transport's."""

    survives_loss = False
    """Whether the surviving workers continue without intervention when one is lost."""

    can_be_elastic = False
    """Whether workers may join and leave between two exchanges."""

    grow: Growth | GivenGrowth | None = None  # how the number of workers that train grows; None if it does not

    probe: Probe | None = None  # synchronous steps whose times choose the rule; None if no probe chooses it

    # -- what is exchanged when -------------------------------------------------------------------

    exchanges_blocks = False
    """Whether all workers together exchange blocks of minibatches."""

    remembers_start = False
    """Whether progress is measured from a start that the rule keeps, so that the program must not replace it."""

    sends_footer = False
    """Whether a footer follows each exchange, as it does for gradients."""

    @property
    def follows_times(self) -> bool:
        """Whether measured times change the period."""
        return False

    def is_lockstep(self, warm: bool) -> bool:
        """Whether gradients are exchanged before the next step; `warm`: whether the warm-up is over."""
        return self.warmup > 0 and not warm

    def can_go_back(self, warm: bool) -> bool:
        """Whether all workers can go back to a state in memory now."""
        return True

    def ends_warmup(self, steps: int) -> bool:
        """Whether the warm-up ends with lockstep step `steps` (the first is 1)."""
        return steps >= self.warmup

    def exchanges_after(self, steps: int) -> int:
        """Exchanges that a single worker has counted after so many steps."""
        return steps
