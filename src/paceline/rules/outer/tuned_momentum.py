# SPDX-License-Identifier: Apache-2.0
"""Tuned momentum: what asynchrony adds to the momentum is taken off the user's.

Where each update goes on from values of a delay tau with P(tau = k) = q (1 - q)^k, q = 1/N, the mean of the gradient
that is applied, V_t = sum_k q (1 - q)^k G_{t-k}, follows the mean gradient G like a momentum:

    V_t = (1 - q) V_{t-1} + q G_t,      D_{t+1} = -lr V_t         D_{t+1} = E[w_{t+1} - w_t]
    D_{t+1} = (1 - 1/N) D_t - (lr/N) G_t

so plain SGD on N workers has the momentum 1 - 1/N in the mean. With an explicit momentum m_e besides,

    D_{t+1} = (m_e + 1 - 1/N) D_t - m_e (1 - 1/N) D_{t-1} - (lr/N) G_t

and the weight of the last move is the user's m when

    m_e  = m - (1 - 1/N)                               may be negative
    rate = (1 - m_e) / (1 - m)                         keeps the gain: a steady gradient moves lr / (1 - m) an update

lr is the learning rate, w the parameters, t counts updates; N as in :mod:`paceline.rules.outer.pushes`.

Source: Mitliagkas, Zhang, Hadjis & Re, Allerton 2016, arXiv 1605.09774, who find the best momentum by trying. Where we
differ: it is computed, and by default the rate rises so that the gain stays; `keep_gain=False` leaves the rate alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import SGD, Optimizer

from paceline.core.parse import check_bool
from paceline.errors import UnsupportedError
from paceline.rules.outer.arrival import Arrival, Push


@dataclass(frozen=True)
class TunedMomentum(Arrival):
    """SGD's momentum, less what asynchrony adds.

    Attributes:
        keep_gain: whether the learning rate changes so that a steady gradient moves as far as with the user's momentum.
    """

    keep_gain: bool = True

    def __post_init__(self) -> None:
        check_bool("keep_gain", self.keep_gain)

    def resolve(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer without such a momentum."""
        if not isinstance(optimizer, SGD):
            raise UnsupportedError(
                f"this rule tunes SGD's momentum, and the optimizer is {type(optimizer).__name__}; "
                'use torch.optim.SGD, or the rule "asgd"'
            )
        for group in optimizer.param_groups:
            if not group["momentum"] < 1:
                raise UnsupportedError(f"momentum must be below 1 to have a gain, got {group['momentum']!r}")

    def rate(self, push: Push) -> float:
        """(1 - m_e) / (1 - m), or 1."""
        if not self.keep_gain:
            return 1.0
        return (1 - self.momentum(push.momentum, push)) / (1 - push.momentum)

    def momentum(self, momentum: float, push: Push) -> float:
        """m_e = m - (1 - 1/N)."""
        return momentum - (1 - 1 / push.workers)

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        return {"implicit_momentum": 1 - 1 / workers}

    def describe(self, workers: int) -> str:
        gain = ", the gain kept" if self.keep_gain else ""
        return f"each push as it comes, SGD's momentum less {1 - 1 / workers:.3g}{gain}"
