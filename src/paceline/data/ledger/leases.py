# SPDX-License-Identifier: Apache-2.0
"""What a worker asks of the ledger and tells it, over whatever transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.data.ledger.ranges import Ranges


class Leases(ABC):
    """A worker's connection to the ledger."""

    @abstractmethod
    def ask(self, question: Question) -> Mark | None:
        """A lease, or None; with `dry`, None means that the epoch is over for all workers."""

    def hand_out(self, marks: list[Mark]) -> None:  # noqa: B027
        """The program gets a batch of these places next: push work that must not be mixed with it."""

    @abstractmethod
    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        """This worker ends its pass before the epoch is over, and returns these places of its leases."""

    @abstractmethod
    def ends(self, loader: int, epoch: int, total: int) -> None:
        """The loader turned out to have only `total` places in this epoch."""

    def learn(self, news: Any) -> None:  # noqa: B027
        """Take over the ledger's progress as of the parameters that this worker now loads."""

    @abstractmethod
    def done(self, marks: list[Mark]) -> None:
        """This worker used these places without a push, and has nothing left to push."""

    def waits(self, now: bool) -> None:  # noqa: B027
        """Whether this worker waits at a barrier, such as a checkpoint; then no worker waits for its places."""

    @abstractmethod
    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """When this epoch begins, only these places remain."""

    @abstractmethod
    def state(self) -> dict[str, Any] | None:
        """The ledger's checkpoint state; None on workers that do not keep the ledger."""

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore `state`."""
