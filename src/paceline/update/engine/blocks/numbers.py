# SPDX-License-Identifier: Apache-2.0
"""What a fragment counts: its blocks, the outer step's coefficients and look-ahead, and the steps and state of the
worker's optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from paceline.core.optimizer_state import Owned, reset_state, set_step_count, step_count
from paceline.rules.outer.base import Coefficients
from paceline.rules.outer.diversity import effective_workers, ratio, smoothed
from paceline.rules.payload import Delta
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


@dataclass(frozen=True)
class Diversity:
    """The diversity of the workers' displacements, as far as the headers tell it.

    The norm of a mean is known when it has been applied, and workers of other machines may round it otherwise. So the
    header of the next exchange tells it, and all take what one worker found.

    Attributes:
        smoothed: A of the last block but one; None before the second exchange.
        mean_of_norms: of the last exchange.
        workers: that brought something to it.
    """

    smoothed: float | None = None
    mean_of_norms: float = 0.0
    workers: int = 0

    @property
    def effective(self) -> float | None:
        """How many workers they are worth; None before that is known."""
        return None if self.smoothed is None else effective_workers(self.smoothed)

    def after(self, summary: ExchangeSummary) -> Diversity:
        """With what the headers of the next exchange tell of the last one."""
        if not self.mean_of_norms or not summary.last_mean_norm:
            return self
        now = ratio(self.mean_of_norms, summary.last_mean_norm, self.workers)
        return replace(self, smoothed=smoothed(self.smoothed, now))

    def then(self, summary: ExchangeSummary) -> Diversity:
        """That exchange is over."""
        return replace(self, mean_of_norms=summary.mean_of_norms, workers=len(summary.accepted))

    def among(self, workers: int) -> Diversity:
        """With another number of workers: they cannot be worth more than they are."""
        most = None if self.smoothed is None else min(self.smoothed, math.sqrt(workers))
        return replace(self, smoothed=most, workers=min(self.workers, workers))


class Contribution(Protocol):
    """The numbers that a chunk needs of its exchange."""

    @property
    def minibatches(self) -> int:
        """The minibatches of this worker's contribution."""

    def end(self, summary: ExchangeSummary) -> BlockEnd:
        """The numbers that apply the mean."""


class PlainMean:
    """The numbers of buffers that are exchanged with gradients: one minibatch, no outer step."""

    minibatches = 1

    def end(self, summary: ExchangeSummary) -> BlockEnd:
        return BlockEnd(Coefficients(0.0, 1.0, 0.0, 0.0), 0.0, 0.0)


class BlockNumbers:
    """The count of a fragment's blocks, and the numbers of the present one.

    Args:
        rule: the rule.
        workers: N, as the rule counts them.

    Attributes:
        block: blocks that have been exchanged.
        rho: equivalent minibatches that the outer step has accumulated.
        ahead: look-ahead momentum of the block's start.
        minibatches: of this worker's contribution to the present exchange.
        diversity: of the workers' displacements, up to the last block but one.
        mixes_at_once: whether the rule's mixing applies to exchanges without overlap.
    """

    def __init__(self, rule: Rule, workers: int) -> None:
        self.rule, self.workers = rule, workers
        self.mixes_at_once = rule.payload.mixing is not None and not rule.schedule.overlap
        self.block, self.rho, self.ahead = 0, 0.0, 0.0
        self.diversity = Diversity()
        self.minibatches = 0
        self._frozen: Coefficients | None = None
        self._end: tuple[ExchangeSummary, BlockEnd] | None = None

    def restart(self, block: int = 0, rho: float = 0.0, ahead: float = 0.0) -> None:
        """Continue from other numbers, such as a checkpoint's, without a pending exchange."""
        self.block, self.rho, self.ahead = block, rho, ahead
        self.diversity = Diversity()
        self._frozen = None

    def coefficients(self) -> Coefficients:
        """The present block's coefficients; during its exchange, those of the beginning of the exchange."""
        return self._frozen or self.rule.coefficients(self.block + 1, self.workers, self.ahead)

    def freeze(self, coefficients: Coefficients | None = None) -> None:
        """Keep these coefficients (by default the present ones) for the exchange, despite retuning."""
        self._frozen = coefficients or self.coefficients()

    def release(self) -> None:
        """End the effect of `freeze`."""
        self._frozen = None

    def renumber(self, workers: int) -> None:
        """Continue with this number of workers, also in a pending exchange."""
        self.workers = workers
        self.diversity = self.diversity.among(workers)
        if self._frozen is not None:
            self._frozen = None
            self.freeze()

    def end(self, summary: ExchangeSummary) -> BlockEnd:
        """The numbers at the end of this exchange."""
        if self._end is None or self._end[0] is not summary:
            self._end = (summary, self._end_of(summary, self.coefficients()))
        return self._end[1]

    def _end_of(self, summary: ExchangeSummary, coefficients: Coefficients) -> BlockEnd:
        coefficients = replace(coefficients, diversity=self.diversity.after(summary).smoothed or 1.0)
        rho, ahead = self.rule.merging.equivalent_minibatches(self.rho, summary.tau, coefficients)
        return BlockEnd(coefficients, rho, ahead)

    def advance(self, summary: ExchangeSummary) -> BlockEnd:
        """Count the exchange; the next block begins."""
        end = self.end(summary)
        self.block, self.rho, self.ahead = self.block + 1, end.rho, end.coefficients.next_momentum
        self.diversity = self.diversity.after(summary).then(summary)
        return end

    def count_in(self, summary: ExchangeSummary, workers: int) -> BlockEnd:
        """Count an exchange among `workers` workers whose result is in the outer state already."""
        end = self._end_of(summary, self.rule.coefficients(self.block + 1, workers, self.ahead))
        self.block, self.rho = self.block + 1, end.rho
        self.diversity = self.diversity.after(summary).then(summary)
        return end


class LocalOptimizers:
    """The worker's optimizers of one fragment.

    Args:
        payload: the rule's; chooses how their state is treated.
        owned: (optimizer, its named parameters) pairs.
        workers: N, as the rule counts them.

    Attributes:
        choices: of each optimizer "keep", "reset", "average" or "compensate".
        counts: of each optimizer the steps at the start of the block, as the rule counts them.
    """

    def __init__(self, payload: Delta, owned: Owned, workers: int = 1) -> None:
        self._payload, self.owned = payload, owned
        self.choices = [payload.resolve(optimizer) for optimizer, _ in owned]
        self._fitted = False
        self._handles: list[Any] = []
        self.fit(workers)
        self.counts: list[float] = []
        self.count()

    def __iter__(self) -> Iterator[tuple[int, str, Optimizer, list[Tensor]]]:
        """Number, choice, optimizer and its parameters."""
        for number, ((optimizer, named), choice) in enumerate(zip(self.owned, self.choices, strict=True)):
            yield number, choice, optimizer, [p for _, p in named]

    @property
    def have_state(self) -> bool:
        """Whether any of them has made a step, or was given a state."""
        return any(len(optimizer.state) for optimizer, _ in self.owned)

    def fit(self, workers: int) -> None:
        """Adapt their settings to several workers, once; a value that the user sets later stays."""
        if self._fitted or workers == 1:
            return
        for optimizer, _ in self.owned:
            if self._payload.fit(optimizer, workers):
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._fitted = True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._payload.hold(optimizer)

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def count(self) -> None:
        """Take the present step counts as those of the block's start."""
        self.counts = [step_count(optimizer, parameters) for _, _, optimizer, parameters in self]

    def reset_for_overlap(self) -> None:
        """Begin the next block before the last one's result has arrived."""
        for _, choice, optimizer, parameters in self:
            if choice == "reset":
                reset_state(optimizer, parameters)

    def advance(self, tau: float, ahead: float, made: int | None, left_out: bool) -> None:
        """Update state and step counts after a block's exchange.

        Args:
            tau: equivalent minibatches of the mean displacement.
            ahead: minibatches by which the next start is ahead of it.
            made: minibatches made since the exchange began; None without overlap.
            left_out: whether this worker's contribution was rejected.
        """
        for number, choice, optimizer, parameters in self:
            if made is None and (choice == "reset" or (choice == "keep" and left_out)):
                reset_state(optimizer, parameters)
            elif choice in ("average", "compensate"):
                self._add(number, choice, tau, ahead)
                set_step_count(optimizer, parameters, self.counts[number] + (made or 0))

    def count_in(self, tau: float, ahead: float) -> None:
        """Count an exchange whose result is in the outer state already."""
        for number, choice in enumerate(self.choices):
            self._add(number, choice, tau, ahead)

    def _add(self, number: int, choice: str, tau: float, ahead: float) -> None:
        self.counts[number] += tau + (ahead if choice == "compensate" else 0.0)

    def restart(self) -> None:
        """Restore the state of the block's start, or reset it if no copy was kept."""
        for number, choice, optimizer, parameters in self:
            if choice != "compensate":  # no copy was kept
                reset_state(optimizer, parameters)
                self.counts[number] = 0.0
            else:
                set_step_count(optimizer, parameters, self.counts[number])

    def begin_block(self, averaged: bool) -> None:
        """Begin a block after a reshard; `averaged`: whether moments had been exchanged."""
        for number, choice, optimizer, parameters in self:
            if choice == "compensate" and averaged:
                set_step_count(optimizer, parameters, self.counts[number])
            elif choice in ("compensate", "reset"):
                reset_state(optimizer, parameters)
                self.counts[number] = 0.0
            else:
                self.counts[number] = step_count(optimizer, parameters)
