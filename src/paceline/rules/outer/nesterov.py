# SPDX-License-Identifier: Apache-2.0
"""DiLoCo's outer step: SGD with Nesterov momentum on the pseudo-gradient.

    g_t     = mean_i (theta_{t-1} - theta_{i,t})              the pseudo-gradient
    b_t     = mu b_{t-1} + g_t                                b_0 = 0
    theta_t = theta_{t-1} - nu (g_t + mu b_t)                 next start and exported model alike

nu is the outer learning rate, mu the outer momentum. Source: Douillard et al., 2311.08105, which takes nu = 0.7 and
mu = 0.9 with 8 workers. It is BMUF's Nesterov form with zeta = nu and eta = mu seen from the workers' start:
theta_t = theta^init and nu b = -Delta, as long as nu and mu are constant. BMUF exports the model without the
look-ahead; DiLoCo, as published, exports theta_t itself, and so do we.

With one worker and `alone=True` it is SNOO (arXiv 2510.15830), every tau steps on the worker's own displacement, and
with mu = 0 Lookahead (Zhang et al., arXiv 1907.08610): theta_t = theta_{t-1} + nu (theta_1,t - theta_{t-1}).

Where we differ: mu follows N by default (:mod:`paceline.rules.outer.gain`); `gain="paper"` gives the constants above.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.core import kernels
from paceline.rules.outer.base import Coefficients, State
from paceline.rules.outer.gain import MomentumStep


@dataclass(frozen=True)
class Nesterov(MomentumStep):
    """Outer Nesterov momentum.

    Attributes:
        momentum: mu; None derives it from the gain.
        lr: nu; None derives it from the gain.
        gain: "auto" (N^0.7, less in the first blocks), "paper" (mu = 0.9, nu = 0.7) or a number, nu/(1-mu).
        ramp: blocks over which mu rises linearly from 0.
    """

    tensors = ("momentum",)  # b
    paper = (0.9, 0.7)

    momentum: float | None = None
    lr: float | None = None
    gain: float | str = "auto"
    ramp: int = 0

    def origin(self, anchor: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """A block begins at theta."""
        return anchor

    def step(self, anchor: Tensor, merged: Tensor, state: State, c: Coefficients, out: Tensor) -> Tensor:
        """b <- mu b - merged; theta <- theta + nu (merged - mu b)."""
        b = state["momentum"]
        if kernels.serve(anchor, merged, b):
            from paceline.core.kernels.blocks import Factors, step

            step(anchor, merged, b, Factors(c.momentum, -1.0, -c.lr * c.momentum, c.lr), out)
        else:
            b.mul_(c.momentum).sub_(merged)
            anchor.add_(merged, alpha=c.lr).sub_(b, alpha=c.lr * c.momentum)
        return anchor

    def equivalent_minibatches(self, rho: float, tau: float, c: Coefficients) -> tuple[float, float]:
        """As BMUF's Nesterov form, to which this is equal."""
        now = c.momentum * rho + c.lr * tau
        return now, max(0.0, c.momentum * now + (c.lr - 1) * tau)

    def describe(self, workers: int) -> str:
        mu, nu = self.eta_zeta(workers)
        return f"outer Nesterov SGD, momentum {mu:.3g}, lr {nu:.3g} ({self.gain_in_words(workers)})"
