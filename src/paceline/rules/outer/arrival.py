# SPDX-License-Identifier: Apache-2.0
"""The base class of asynchronous outer steps: how the owner of a shard applies a push.

Asynchronous workers push whenever they have a contribution, and the owner of a shard applies each push by itself:

    delta:      theta += rate * d
    gradient:   mend g, then one step of the user's optimizer with the rate lr * rate

tau, the *delay* of a push, counts the updates of the shard since the version at which the push was computed. The rules
differ in how they use tau. All are element-wise, so they apply to any shard, and work in place on explicit state, which
checkpoints hold: the anchor (theta), the tensors that `tensors` names, and, if `needs_origin`, the values that each
worker pulled last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from paceline.rules.outer.base import State


@dataclass(frozen=True)
class Push:
    """The metadata of one push.

    Attributes:
        delay: tau, updates of the shard since the version at which the push was computed.
        update: t, the number of this update of the shard; the first is 1.
        workers: N, workers that take part in the worker's clock.
        lr: the worker's learning rate; unused for deltas and parameters.
        momentum: the momentum of the worker's SGD; 0.0 for optimizers without.
        highest_lr: the highest learning rate of the shard's pushes so far, this one included.
    """

    delay: int
    update: int
    workers: int
    lr: float
    momentum: float = 0.0
    highest_lr: float = 0.0


class Arrival(ABC):
    """How one push becomes the next values of a shard; by default without state, its gradient unchanged, in full."""

    needs_origin = False
    """Whether the owner keeps, for each worker, the values that the worker has pulled and may compute at. They are
    copied when the worker *pulls*, not when it pushes: in between another push may have changed the shard, and while an
    answer is in flight a worker computes at older values than the last that the owner sent."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the state tensors besides the anchor, each of the shard's shape, initially 0."""
        return ()

    def resolve(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Raise `UnsupportedError` if the user's optimizer cannot be served."""

    def mend(  # noqa: B027
        self, gradient: Tensor, anchor: Tensor, origin: Tensor | None, state: State, push: Push
    ) -> None:
        """Change `gradient`, shape (n,), fp32, in place before the optimizer sees it.

        Args:
            gradient: the mean of the push.
            anchor: the shard's present values, shape (n,).
            origin: the values at which the gradient was computed, shape (n,), if `needs_origin`; else None.
            state: the tensors that `tensors` names, which may be changed.
            push: the push's metadata.
        """

    def rate(self, push: Push) -> float:
        """The factor on the learning rate (gradients) or on the displacement (deltas)."""
        return 1.0

    def momentum(self, momentum: float, push: Push) -> float:
        """The momentum of the optimizer's step, if the user's SGD has `momentum`."""
        return momentum

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        """Its numbers with N = `workers`, for `paceline explain`."""
        return {}

    @abstractmethod
    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""
