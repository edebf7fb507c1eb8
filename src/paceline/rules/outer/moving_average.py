# SPDX-License-Identifier: Apache-2.0
"""Moving average of the global model (EMA): it is exported and evaluated; training continues from the model itself.

    avg_n = avg_{n-1} + w_n (theta_n - avg_{n-1}),     w_n = (1 - b) / (1 - b^n)
          = (1 - b) / (1 - b^n) sum_{k=1..n} b^(n-k) theta_k

theta_n is the global model after block n, as any other outer step gives it; b is the decay. w_n contains the bias
correction: w_1 = 1, so the model before the first block has no share. The average covers about 1 / (1 - b) blocks. It
removes the noise that a learning rate above 0 leaves in the last model, as far as theta itself does not move on.

Source: Sanyal et al., arXiv 2306.03241 (LAWA, the mean of the latest checkpoints); Ajroldi et al., arXiv 2502.06761,
who find the mean and the exponential average alike. Where we differ: the average is over the models after exchanges,
one a block, and needs one buffer. Buffers of the model, such as running statistics, are not averaged over blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.rules.outer.base import Coefficients, Outer, State

EMA = "ema"
"""The name of the state tensor."""


@dataclass(frozen=True)
class MovingAverage:
    """Another outer step, whose models are averaged.

    Attributes:
        outer: gives theta and the next start; neither depends on the average.
        decay: b.
    """

    outer: Outer
    decay: float

    @property
    def tensors(self) -> tuple[str, ...]:
        """Those of the other step, and the average."""
        return (*self.outer.tensors, EMA)

    def momentum_at(self, block: int, workers: float) -> float:
        return self.outer.momentum_at(block, workers)

    def lr_at(self, block: int, workers: float) -> float:
        return self.outer.lr_at(block, workers)

    def origin(self, anchor: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        return self.outer.origin(anchor, state, c, out)

    def step(self, anchor: Tensor, merged: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """The other step, then avg += w (theta - avg)."""
        start = self.outer.step(anchor, merged, state, c, out)
        state[EMA].lerp_(anchor, (1 - self.decay) / (1 - self.decay**c.block))
        return start

    def equivalent_minibatches(self, rho: float, tau: float, c: Coefficients) -> tuple[float, float]:
        return self.outer.equivalent_minibatches(rho, tau, c)

    def describe(self, workers: int) -> str:
        return f"{self.outer.describe(workers)}; exported as a moving average, b {self.decay:g}"
