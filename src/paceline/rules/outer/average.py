# SPDX-License-Identifier: Apache-2.0
"""Average: the mean itself is the next model.

    theta_t = theta^init + d_n,     d_n = mean_i (theta_i - theta^init),     theta^init_next = theta_t

With a block payload this is model averaging (local SGD); with a gradient payload the mean gradient goes to the user's
optimizer. With tau = 1 and plain SGD the two are the same method.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.rules.outer.base import Coefficients, State


@dataclass(frozen=True)
class Average:
    """Add the mean displacement."""

    tensors = ()

    def momentum_at(self, block: int, workers: float) -> float:
        return 0.0

    def lr_at(self, block: int, workers: float) -> float:
        """The mean as it is."""
        return 1.0

    def origin(self, anchor: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """A block begins at the global model."""
        return anchor

    def step(self, anchor: Tensor, merged: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """theta += d."""
        return anchor.add_(merged)

    def equivalent_minibatches(self, rho: float, tau: float, c: Coefficients) -> tuple[float, float]:
        """The update is worth tau minibatches, and the start is where the mean is."""
        return tau, 0.0

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        return {}

    def describe(self, workers: int) -> str:
        return "the mean"
