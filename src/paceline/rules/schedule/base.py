# SPDX-License-Identifier: Apache-2.0
"""What a schedule is, and the questions that it answers.

The code that runs a rule asks what it wants to know, and not which schedule it has. Most answers here are those of
workers that exchange gradients together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class Schedule(ABC):
    """When workers exchange."""

    # -- its numbers ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def period(self) -> int:
        """Minibatches of a block on each worker; 1 where every minibatch is exchanged."""

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
        """Minibatches that a worker makes while an exchange is under way."""

    @abstractmethod
    def numbers(self) -> dict[str, float | int | str]:
        """Its numbers by name, for `paceline explain`."""

    @abstractmethod
    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""

    # -- which workers exchange ---------------------------------------------------------------------------

    engine = "collective"
    """What runs it: "collective", where all workers meet at each exchange, or "server", where each worker exchanges
    with the owners of the shards."""

    workers_meet = True
    """Whether all workers take part in each exchange: there they agree on changes, and stand at the same step."""

    compares_contributions = True
    """Whether all contributions to an exchange are compared, so that a guard can find outliers."""

    opens_connections = False
    """Whether workers open connections of their own beside the transport."""

    survives_loss = False
    """Whether the other workers go on by themselves when one is lost."""

    can_be_elastic = False
    """Whether workers may join and leave between two exchanges."""

    # -- what is exchanged when -------------------------------------------------------------------

    exchanges_blocks = False
    """Whether the workers exchange what blocks of minibatches have changed, all together."""

    remembers_start = False
    """Whether progress is measured from a start that the rule keeps, so that the program must not replace it."""

    sends_footer = False
    """Whether a footer follows each exchange: which gradients there were, after the gradients."""

    @property
    def follows_times(self) -> bool:
        """Whether measured times change the period."""
        return False

    def is_lockstep(self, warm: bool) -> bool:
        """Whether gradients are exchanged before the next step; `warm` says that the warm-up is over."""
        return self.warmup > 0 and not warm

    def can_go_back(self, warm: bool) -> bool:
        """Whether all workers stand where they can go back to a state that they keep in memory."""
        return True

    def ends_warmup(self, steps: int) -> bool:
        """Whether the warm-up is over with step number `steps` (the first is 1), which was one of lockstep."""
        return steps >= self.warmup

    def exchanges_after(self, steps: int) -> int:
        """Exchanges that a single worker has counted after so many steps."""
        return steps


def is_whole(value: object) -> bool:
    """A whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)
