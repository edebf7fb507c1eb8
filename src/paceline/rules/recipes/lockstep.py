# SPDX-License-Identifier: Apache-2.0
"""Recipes that exchange before every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.rules.codec import LowRank, OneBit, TopK
from paceline.rules.outer import Average, FrozenAdam
from paceline.rules.payload import FirstMoment, Gradient
from paceline.rules.recipes.options import Recipe, RouteOptions, carried_by, takes
from paceline.rules.rule import Rule
from paceline.rules.schedule import EveryStep

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(RouteOptions)
def sync(*, codec: str = "dense", warmup: int = 0, **route: Unpack[RouteOptions]) -> Rule:
    """Synchronous SGD: the workers' mean gradient goes to the optimizer, every step.

    Bytes: 2 (N-1)/N * 4 P a step from each worker; with another codec what its file says.

    >>> from paceline.rules.recipes import sync
    >>> from paceline.rules.traffic import bytes_per_block
    >>> bytes_per_block(sync(), workers=4, parameters=1_000_000)
    6000000

    Args:
        codec: how gradients are written: dense, bf16, fp16, int8, e3m0, one_bit, sign, low_rank, top_k.
        warmup: dense exchanges before the codec begins.
        reproducible: sum in rank order, so that the bits depend on nothing but the gradients.
    """
    return Rule(EveryStep(), Gradient(), outer=Average(), **carried_by(codec, warmup, **route))


@takes(RouteOptions)
def one_bit(*, warmup: int = 100, feedback: bool = True, **route: Unpack[RouteOptions]) -> Rule:
    """1-bit SGD: the gradient's signs and two levels a column, with what was not sent added to the next gradient.

    Bytes: 2 (N-1)/N * (P/8 + 8 C) a step from each worker, C columns.

    Args:
        warmup: dense steps before the first of one bit.
        feedback: keep what was not sent, on the workers and on the owners of the slices.
        reproducible: sum in rank order in the warm-up (one bit always does).
    """
    return Rule(EveryStep(), Gradient(), outer=Average(), **carried_by(OneBit(feedback), warmup, **route))


@takes(RouteOptions)
def power(*, rank: int = 4, warmup: int = 100, feedback: bool = True, **route: Unpack[RouteOptions]) -> Rule:
    """PowerSGD: every matrix of gradients as the product of two thin ones.

    Bytes: 2 (N-1)/N * 4 r (a + b) a step from each worker for a matrix of a x b; vectors and small matrices dense.

    Args:
        rank: r, columns of the thin matrices.
        warmup: dense steps before.
        feedback: keep what was not sent.
        chunks: pieces into which an exchange is cut, between tensors.
    """
    codec = LowRank(rank=rank, feedback=feedback)
    return Rule(EveryStep(), Gradient(), outer=Average(), **carried_by(codec, warmup, **route))


@takes(RouteOptions)
def top_k(
    *,
    ratio: float = 0.01,
    momentum: float = 0.0,
    nesterov: bool = False,
    warmup: int = 100,
    feedback: bool = True,
    **route: Unpack[RouteOptions],
) -> Rule:
    """Deep gradient compression: the largest numbers of the gradient, the others kept for later.

    Bytes: (N-1) 8 k a step from each worker, k = ratio P rounded up in each chunk.

    Args:
        ratio: share of the numbers that is sent.
        momentum: of the workers' own momentum before the choice, with SGD without momentum; 0 leaves momentum to the
            optimizer.
        nesterov: Nesterov's form of it.
        warmup: steps at each of the publication's ratios (0.25, 0.063, 0.015, 0.004) that are above `ratio`.
        feedback: keep what was not sent.
        reproducible: sum in rank order (top-k always does).
    """
    codec = TopK(ratio, momentum, nesterov, warmup or (), feedback)
    return Rule(EveryStep(), Gradient(), outer=Average(), **carried_by(codec, 0, **route))


@takes(RouteOptions)
def one_bit_adam(*, warmup: int = 1000, codec: str = "sign", **route: Unpack[RouteOptions]) -> Rule:
    """1-bit Adam: Adam's first moment by one bit a number, the second frozen after a warm-up of plain Adam.

    Gradients are exchanged before the step and not while backward goes on, because the moment takes what the program
    made of them (clipping). A good warm-up is 15 to 25 % of all steps.

    Bytes: 2 (N-1)/N * 4 P a step from each worker in the warm-up, then 2 (N-1)/N * (P/8 + 4 C), C columns.

    Args:
        warmup: steps of plain Adam with dense gradients.
        codec: how the moment is written.
        reproducible: sum in rank order in the warm-up.
    """
    return Rule(EveryStep(), FirstMoment(warmup), outer=FrozenAdam(), **carried_by(codec, warmup, **route))


LOCKSTEP = (
    Recipe(
        "sync",
        "Synchronous SGD: the mean gradient, every step.",
        "g = mean_i g_i, then the optimizer's own step",
        "large batches: Goyal et al. 2017, arXiv 1706.02677",
        "The network carries a gradient a step and workers are alike. Scale the learning rate with the minibatch.",
        sync,
    ),
    Recipe(
        "one_bit",
        "1-bit SGD: one bit a number of the gradient, fed back.",
        """x_i = g_i + r_i,  q_i = Q(x_i),  r_i = x_i - q_i            (each worker)
s = sum_i q_i + o,  total = Q(s),  o = s - Q(s)             (the owner of each slice)
g = total / N, then the optimizer's own step""",
        "F. Seide et al., Interspeech 2014",
        "As sync, where the network does not carry a whole gradient a step. Coding takes time of the processor.",
        one_bit,
    ),
    Recipe(
        "power",
        "PowerSGD: gradients of low rank, with error feedback.",
        """M_i = g_i + e_i
P = orthonormal(sum_i M_i Q),  Q = sum_i M_i^T P
g = P Q^T / N,  e_i = M_i - P (M_i^T P)^T""",
        "T. Vogels et al., NeurIPS 2019, arXiv 1905.13727",
        "As sync, with large matrices and a network that carries far less than a gradient a step.",
        power,
    ),
    Recipe(
        "top_k",
        "Deep gradient compression: the largest numbers of the gradient.",
        """u = m u + g,  v = v + u                      (each worker)
send the k largest |v|; there u = v = 0
g = mean of what was sent""",
        "Y. Lin et al., ICLR 2018, arXiv 1712.01887",
        "As sync, on a very slow network. It costs more quality than the other codecs: compare it on your task.",
        top_k,
    ),
    Recipe(
        "one_bit_adam",
        "1-bit Adam: the first moment in bits, the second frozen.",
        """m_i = b1 m + (1 - b1) g_i
m = Q(mean_i Q(m_i + e_i) + e_s)
theta = theta - lr (mhat / (sqrt(vhat_frozen) + eps) + wd theta)""",
        "H. Tang et al., arXiv 2102.02888",
        "As one_bit, for Adam. Its warm-up, which is synchronous Adam, should last a fifth of the training.",
        one_bit_adam,
    ),
)
