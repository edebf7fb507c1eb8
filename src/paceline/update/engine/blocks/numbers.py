# SPDX-License-Identifier: Apache-2.0
"""The numbers of a fragment's blocks: their count, the outer step's coefficients, and how far it looks ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.rules.outer.base import Coefficients
from paceline.rules.rule import Rule
from paceline.update.exchange.header import ExchangeSummary


@dataclass(frozen=True)
class BlockEnd:
    """The coefficients and counts at the end of a block, the same on every worker.

    Attributes:
        coefficients: of the outer step.
        rho: equivalent minibatches that the outer step has accumulated.
        ahead: kv, minibatches that the next start is ahead of the mean of the local models.
    """

    coefficients: Coefficients
    rho: float
    ahead: float


class Contribution(Protocol):
    """What a chunk needs to know about its exchange."""

    @property
    def minibatches(self) -> int:
        """What this worker's contribution stands for."""

    def end(self, summary: ExchangeSummary) -> BlockEnd:
        """The numbers with which the mean is applied."""


class PlainMean:
    """Buffers that go with gradients: each worker made one minibatch, and no outer step follows."""

    minibatches = 1

    def end(self, summary: ExchangeSummary) -> BlockEnd:
        """No outer step."""
        return BlockEnd(Coefficients(0.0, 1.0, 0.0, 0.0), 0.0, 0.0)


class BlockNumbers:
    """Where the sequence of a fragment's blocks stands.

    Args:
        rule: the rule.
        workers: N, as the rule counts them.

    Attributes:
        block: blocks that have been exchanged.
        rho: equivalent minibatches that the outer step has accumulated.
        ahead: look-ahead momentum of the block's start.
        minibatches: what this worker's contribution to the exchange under way stands for.
    """

    def __init__(self, rule: Rule, workers: int) -> None:
        self.rule, self.workers = rule, workers
        self.block, self.rho, self.ahead = 0, 0.0, 0.0
        self.minibatches = 0
        self._held: Coefficients | None = None
        self._end: tuple[ExchangeSummary, BlockEnd] | None = None

    def restart(self, block: int = 0, rho: float = 0.0, ahead: float = 0.0) -> None:
        """Go on from other numbers, such as a checkpoint's; no exchange is under way."""
        self.block, self.rho, self.ahead = block, rho, ahead
        self._held = None

    def coefficients(self) -> Coefficients:
        """Of the block under way; of one that is being exchanged, those with which its exchange began."""
        return self._held or self.rule.coefficients(self.block + 1, self.workers, self.ahead)

    def hold(self, coefficients: Coefficients | None = None) -> None:
        """Fix the coefficients with which the exchange ends, despite retuning; None: the present ones."""
        self._held = coefficients or self.coefficients()

    def release(self) -> None:
        """The exchange is over."""
        self._held = None

    def renumber(self, workers: int) -> None:
        """The exchange under way, if any, is made among so many workers."""
        self.workers = workers
        if self._held is not None:
            self._held = None
            self.hold()

    def end(self, summary: ExchangeSummary) -> BlockEnd:
        """What this exchange means in numbers."""
        if self._end is None or self._end[0] is not summary:
            self._end = (summary, self._end_of(summary, self.coefficients()))
        return self._end[1]

    def _end_of(self, summary: ExchangeSummary, coefficients: Coefficients) -> BlockEnd:
        rho, ahead = self.rule.merging.equivalent_minibatches(self.rho, summary.tau, coefficients)
        return BlockEnd(coefficients, rho, ahead)

    def advance(self, summary: ExchangeSummary) -> BlockEnd:
        """The exchange counts: the next block begins."""
        end = self.end(summary)
        self.block, self.rho, self.ahead = self.block + 1, end.rho, end.coefficients.next_momentum
        return end

    def count_in(self, summary: ExchangeSummary, workers: int) -> BlockEnd:
        """Count an exchange among `workers` workers whose result is in the outer state already."""
        end = self._end_of(summary, self.rule.coefficients(self.block + 1, workers, self.ahead))
        self.block, self.rho = self.block + 1, end.rho
        return end
