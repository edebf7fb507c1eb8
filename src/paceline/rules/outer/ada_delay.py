# SPDX-License-Identifier: Apache-2.0
"""AdaDelay: the learning rate falls with time and with the delay that was measured.

    alpha(t, tau) = 1 / (L + c sqrt(t + tau)),      L = 1 / lr
                  = lr / (1 + lr c sqrt(t + tau))
    adaptive:       c_j = sqrt((1/t) sum_{s<=t} s / (s + tau_s) g_sj^2)          for each coordinate j

t counts the updates of the piece (the first is 1), tau_s is the delay of update s and g_s its gradient; the sum holds
the present gradient before it is used. A constant c makes alpha a factor on the learning rate, whatever the optimizer.
The adaptive one is a factor for each coordinate, so it goes on the gradient:

    g_j <- g_j / (1 + lr c_j sqrt(t + tau))

which with plain SGD of the rate lr is the step alpha_j g_j. Adam would divide a slow factor out again.

Source: Sra, Yu, Li & Smola, AISTATS 2016, arXiv 1508.05003; the formulas are as recalled from the paper and were not
compared with its text. Where we differ: no projection on a set; t is counted for each piece by its owner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.parse import check, is_number
from paceline.rules.outer.arrival import Arrival, Push
from paceline.rules.outer.base import State


@dataclass(frozen=True)
class AdaDelay(Arrival):
    """Steps that fall with sqrt(t + tau).

    Attributes:
        c: how fast: "adaptive" measures it for each coordinate, or a number, at least 0.
    """

    c: float | str = "adaptive"

    def __post_init__(self) -> None:
        fits = self.c == "adaptive" or (is_number(self.c) and self.c >= 0)
        check(fits, "c", '"adaptive" or a number, at least 0', self.c)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The running sum of s / (s + tau_s) g_s^2, where c is adaptive."""
        return ("squares",) if self.c == "adaptive" else ()

    @torch.no_grad()
    def mend(self, gradient: Tensor, anchor: Tensor, origin: Tensor | None, state: State, push: Push) -> None:
        """g_j / (1 + lr c_j sqrt(t + tau)), where c is adaptive."""
        if self.c != "adaptive":
            return
        t, now = push.update, push.update + push.delay
        squares = state["squares"].addcmul_(gradient, gradient, value=t / now)
        slower = squares.div(t).sqrt_().mul_(push.lr * math.sqrt(now)).add_(1)
        gradient.div_(slower)

    def rate(self, push: Push) -> float:
        """1 / (1 + lr c sqrt(t + tau)) where c is a number."""
        c = self.c if is_number(self.c) else 0.0
        return 1 / (1 + push.lr * c * math.sqrt(push.update + push.delay))

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        return {"c": self.c}

    def describe(self, workers: int) -> str:
        which = "c measured for each coordinate" if self.c == "adaptive" else f"c = {self.c}"
        return f"each push as it comes, rate 1/(1/lr + c sqrt(t + delay)), {which}"
