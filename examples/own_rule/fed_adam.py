# SPDX-License-Identifier: Apache-2.0
"""An outer step that paceline does not have: Adam on the workers' mean delta (FedAdam, Reddi et al., 2003.00295).

m     = beta1 m + (1 - beta1) d
v     = beta2 v + (1 - beta2) d d
theta = theta + lr m / (sqrt(v) + tau)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.rules.outer.base import Coefficients, State


@dataclass(frozen=True)
class FedAdam:
    """Outer Adam; `tau` is how large a delta has to be to count."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    @property
    def tensors(self) -> tuple[str, ...]:
        return ("m", "v")

    def momentum_at(self, block: int, workers: int) -> float:
        return self.beta1

    def lr_at(self, block: int, workers: int) -> float:
        return self.lr

    def origin(self, anchor: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        return anchor  # a block begins at theta

    def step(self, anchor: Tensor, merged: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        m, v = state["m"], state["v"]
        m.mul_(c.momentum).add_(merged, alpha=1 - c.momentum)
        v.mul_(self.beta2).addcmul_(merged, merged, value=1 - self.beta2)
        return anchor.addcdiv_(m, v.sqrt().add_(self.tau), value=c.lr)

    def equivalent_minibatches(self, rho: float, tau: float, c: Coefficients) -> tuple[float, float]:
        return tau, 0.0  # the next start is not ahead of the model

    def describe(self, workers: int) -> str:
        return f"outer Adam, lr {self.lr:g}, beta1 {self.beta1:g}, beta2 {self.beta2:g}"
