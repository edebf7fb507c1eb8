# SPDX-License-Identifier: Apache-2.0
"""Moment compensation: the optimizer's moving averages, aged by what the outer step added (BMUF-Adam).

A moment s follows s <- b s + (1-b) x over a worker's steps. All workers start a block from the same s^init, so after
k_i steps, with a stationary mean E, the workers' mean is

    sbar = B s^init + (1 - B) E,      B = sum_i w_i b^{k_i}        (w_i: weights of the workers; B = b^tau when equal)
    E    = (sbar - B s^init) / (1 - B)

The outer step puts the next start kv minibatches ahead of the mean of the local models, so the moments are continued
for kv virtual steps with the same E:

    s^init_next = b^kv sbar + (1 - b^kv) E

and the counter of the bias correction likewise: k_next = k + tau + kv, a real number; then s^init/(1 - b^k) = E at
every block. For averages of squares E is a mean of squares and is clamped at 0 against rounding.

Source: Chen, Ding & Huo, ICASSP 2020 (their formulas are images; derived again in two steps, which is also the
numerically safe form: the closed form has coefficients of +50 and -49 at b = 0.999, tau = 8, N = 64). The recursion
holds for any scale of x, hence also for SGD's momentum buffer.
"""

from __future__ import annotations

from torch import Tensor


def compensate(mean: Tensor, init: Tensor, *, decay: float, ahead: float, square: bool, out: Tensor) -> Tensor:
    """The moment from which the next block starts, shape (n,), written to `out`.

    Args:
        mean: sbar, shape (n,), fp32.
        init: s^init of the block that ended, shape (n,), fp32.
        decay: B.
        ahead: b^kv.
        square: whether the moment averages squares.
        out: where the result goes; may be `init`, must not be `mean`.
    """
    estimate = out.copy_(init) if out is not init else init
    estimate.mul_(-decay).add_(mean).div_(1 - decay)  # E
    if square:
        estimate.clamp_(min=0)
    return estimate.mul_(1 - ahead).add_(mean, alpha=ahead)


def block_decay(b: float, steps: list[int], weights: list[float]) -> float:
    """B = sum_i w_i b^{k_i} with the weights brought to a sum of 1."""
    total = sum(weights)
    return sum(w / total * b**k for w, k in zip(weights, steps, strict=True))
