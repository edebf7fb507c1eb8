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

    # -- who meets whom ---------------------------------------------------------------------------

    @property
    def engine(self) -> str:
        """What runs it: "collective", where all workers meet at each exchange, or "server", where each worker exchanges
        with the owners of the shards."""
        return "collective"

    @property
    def workers_meet(self) -> bool:
        """Whether all workers come to each exchange: there they agree on changes, and stand at the same step."""
        return True

    @property
    def compares_contributions(self) -> bool:
        """Whether the workers' contributions are there side by side, so that a guard can tell the outliers."""
        return True

    @property
    def opens_connections(self) -> bool:
        """Whether workers open connections of their own beside the transport."""
        return False

    @property
    def survives_loss(self) -> bool:
        """Whether the other workers go on by themselves when one is lost."""
        return False

    @property
    def can_be_elastic(self) -> bool:
        """Whether workers may join and leave between two exchanges."""
        return False

    # -- what is exchanged when -------------------------------------------------------------------

    @property
    def exchanges_blocks(self) -> bool:
        """Whether the workers exchange what blocks of minibatches have changed, all together."""
        return False

    @property
    def remembers_start(self) -> bool:
        """Whether progress is measured from a start that the rule keeps, so that the program must not replace it."""
        return False

    @property
    def sends_footer(self) -> bool:
        """Whether a footer follows each exchange: which gradients there were, after the gradients."""
        return False

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
        """Exchanges that a worker without others has made after so many steps."""
        return steps


def is_whole(value: object) -> bool:
    """A whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)
