# SPDX-License-Identifier: Apache-2.0
"""Elastic averaging: worker and center pull each other, and neither takes the other's place.

    e_i = alpha (x_i - c),     alpha = beta / N
    c   <- c + e_i                                  at the owner
    x_i <- x_i - e_i                                at the worker

x_i are a worker's parameters, c the center, which is what is exported and evaluated. The sum x_i + c does not change.
alpha falls with N so that the center's own pull, N alpha = beta a clock, does not. Workers keep apart and explore: what
holds them is a spring, and the worker's optimizer keeps its state.

Source: Zhang, Choromanska & LeCun, NIPS 2015, arXiv 1412.6651 (beta = 0.9). Their Algorithm 1 takes the gradient of the
step that follows a pull at x_i as it was before the pull: x_i <- x_i - e_i - lr g(x_i). With an overlap of 1, the
default, that is what we do: x_i is pushed after its block, the next minibatch is computed at it, and the pull lands on
what comes out. Where we differ: with an overlap of 0 the pull lands first, and the gradient is taken after it; an
answer that is late lands some minibatches later; there is no pull before the first step (all start at the center, so it
would change nothing); and a last one, of a shorter block if need be, ends the training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.parse import check, is_number
from paceline.rules.outer.arrival import Arrival, Push


@dataclass(frozen=True)
class Elastic(Arrival):
    """Pull worker and center together.

    Attributes:
        beta: N alpha, above 0, at most 1.
    """

    beta: float = 0.9

    def __post_init__(self) -> None:
        check(is_number(self.beta) and 0 < self.beta <= 1, "beta", "a number above 0, at most 1", self.beta)

    def alpha(self, workers: int) -> float:
        """beta / N."""
        return self.beta / workers

    def rate(self, push: Push) -> float:
        """alpha, the factor on x_i - c by which the center moves."""
        return self.alpha(push.workers)

    @torch.no_grad()
    def elastic_pull(self, x: Tensor, center_before: Tensor, workers: int, out: Tensor | None = None) -> Tensor:
        """e = alpha (x - c), shape (n,), written to `out` where given; the same bits at the worker and at the owner.

        Args:
            x: the worker's parameters as it pushed them, shape (n,).
            center_before: the center before the push moved it, shape (n,).
            workers: N.
            out: where the result goes; may be `x`.
        """
        return torch.sub(x, center_before, out=out).mul_(self.alpha(workers))

    @torch.no_grad()
    def elastic_step(self, center: Tensor, x: Tensor, workers: int) -> None:
        """c += e, in place at the owner."""
        center.add_(self.elastic_pull(x, center, workers))

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        return {"beta": self.beta, "alpha": self.alpha(workers)}

    def describe(self, workers: int) -> str:
        return f"worker and center pull each other, alpha {self.alpha(workers):.3g}"
