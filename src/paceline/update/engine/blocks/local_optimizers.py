# SPDX-License-Identifier: Apache-2.0
"""Keeps, resets, averages or compensates the state of the worker's optimizers at the end of a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.core.optimizer_state import Owned, reset_state, set_step_count, step_count
from paceline.rules.payload import Delta


class LocalOptimizers:
    """The worker's optimizers of one fragment.

    Args:
        payload: the rule's; chooses how their state is treated.
        owned: (optimizer, its named parameters) pairs.

    Attributes:
        choices: of each optimizer "keep", "reset", "average" or "compensate".
        counts: of each optimizer the steps at the start of the block, as the rule counts them.
    """

    def __init__(self, payload: Delta, owned: Owned) -> None:
        self._payload, self.owned = payload, owned
        self.choices = [payload.resolve(optimizer) for optimizer, _ in owned]
        self._fitted = False
        self._handles: list[Any] = []
        self.counts: list[float] = []

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
