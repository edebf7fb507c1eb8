# SPDX-License-Identifier: Apache-2.0
"""What the owner of a piece does with one push.

Asynchronous workers send what they have when they have it, and the owner of a piece applies each push by itself:

    delta:      theta += rate * d
    gradient:   mend g, then one step of the user's optimizer with the rate lr * rate

tau, the *delay* of a push, is how many updates were applied to the piece since the version at which its numbers were
computed. The rules here differ in what they make of tau. All are element-wise, so they can be applied to any piece, and
work in place on explicit state, which is what a checkpoint holds: the anchor (theta), the tensors that `tensors` names,
and, where `needs_origin`, the values that each worker pulled last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from paceline.rules.outer.base import State


@dataclass(frozen=True)
class Push:
    """What is known of one push besides its numbers.

    Attributes:
        delay: tau, updates that were applied to the piece since the version at which the numbers were computed.
        update: t, updates applied to the piece before this one, plus 1: the first is 1.
        workers: N, workers that take part in the clock to which the push brings its worker.
        lr: the learning rate that came with it; means nothing for deltas and parameters.
        momentum: the momentum of the worker's SGD; 0.0 for optimizers without.
    """

    delay: int
    update: int
    workers: int
    lr: float
    momentum: float = 0.0


@runtime_checkable
class Arrival(Protocol):
    """How one push becomes the next values of a piece."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the state tensors besides the anchor, each of the piece's shape, zeros at first."""

    @property
    def needs_origin(self) -> bool:
        """Whether the owner keeps, for each worker, the values which that worker has pulled and may compute at.

        They are copied when the worker *pulls* and never when it pushes: between the two another worker's push may
        have changed the piece, and with an answer under way a worker computes at older values than the last it sent.
        """

    def resolve(self, optimizer: Optimizer) -> None:
        """Raise `UnsupportedError` where the user's optimizer cannot be served."""

    def mend(self, gradient: Tensor, anchor: Tensor, origin: Tensor | None, state: State, push: Push) -> None:
        """Change `gradient`, shape (n,), fp32, in place before the optimizer sees it.

        Args:
            gradient: the mean of what the push brings.
            anchor: the piece's values now, shape (n,).
            origin: the values at which the gradient was computed, shape (n,), where `needs_origin`; else None.
            state: the tensors that `tensors` names, which may be changed.
            push: what is known besides.
        """

    def rate(self, push: Push) -> float:
        """The factor on the learning rate (gradients) or on the displacement (deltas)."""

    def momentum(self, momentum: float, push: Push) -> float:
        """The momentum of the optimizer's step, where the user's SGD has `momentum`."""

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        """The numbers that it works with when N = `workers`, for `paceline explain`."""

    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""


class CenterPull(Protocol):
    """How worker and center pull each other, where a push is the worker's parameters."""

    def elastic_pull(self, x: Tensor, center_before: Tensor, workers: int, out: Tensor | None = None) -> Tensor:
        """What a worker at `x` subtracts from it, shape (n,)."""

    def elastic_step(self, center: Tensor, x: Tensor, workers: int) -> None:
        """Move the center, in place at the owner."""


class Plain:
    """What most rules leave as it is: no state, the gradient as it came, each push in full."""

    needs_origin = False

    @property
    def center_pull(self) -> CenterPull | None:
        """None: a push is a gradient or a delta."""
        return None

    @property
    def tensors(self) -> tuple[str, ...]:
        """No state besides the anchor."""
        return ()

    def resolve(self, optimizer: Optimizer) -> None:
        """Any optimizer."""

    def mend(self, gradient: Tensor, anchor: Tensor, origin: Tensor | None, state: State, push: Push) -> None:
        """The gradient as it came."""

    def rate(self, push: Push) -> float:
        """In full."""
        return 1.0

    def momentum(self, momentum: float, push: Push) -> float:
        """The user's."""
        return momentum

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        """None."""
        return {}


def is_number(value: object) -> TypeGuard[float]:
    """A finite number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
