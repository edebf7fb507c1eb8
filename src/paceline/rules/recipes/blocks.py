# SPDX-License-Identifier: Apache-2.0
"""Recipes that exchange after blocks of minibatches, all workers together; `options` has what their settings mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.rules.outer import Average, BlockMomentum, Nesterov
from paceline.rules.payload import Delta
from paceline.rules.recipes.options import (
    AdamOptions,
    BlockOptions,
    MomentumOptions,
    OuterOptions,
    Recipe,
    StreamingOptions,
    block_fields,
    takes,
)
from paceline.rules.rule import Rule

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(BlockOptions)
def averaging(**options: Unpack[BlockOptions]) -> Rule:
    """Model averaging (local SGD): every block starts from the mean of the local models.

    Bytes: 2 (N-1)/N * 4 P a block from each worker (and as much again for each moment that is exchanged); with another
    codec what its file says.
    """
    return Rule(payload=Delta(options["local_state"]), outer=Average(), **block_fields(options))


@takes(MomentumOptions)
def bmuf(**options: Unpack[MomentumOptions]) -> Rule:
    """Blockwise model-update filtering: block momentum over the mean displacement.

    Bytes: 2 (N-1)/N * 4 P a block from each worker (and as much again for each moment that is exchanged); with another
    codec what its file says.

    >>> from paceline.rules.describe import numbers
    >>> from paceline.rules.recipes import bmuf
    >>> round(numbers(bmuf(period=8), workers=4)["gain"], 3)  # 4 to the power of 0.7
    2.639
    >>> numbers(bmuf(gain="paper"), workers=4)["momentum"]
    0.75
    """
    return Rule(payload=Delta(options["local_state"]), outer=_momentum(options), **block_fields(options))


@takes(AdamOptions, period=8, local_state="compensate")
def bmuf_adam(**options: Unpack[AdamOptions]) -> Rule:
    """BMUF for Adam and AdamW: the moments are averaged too, and aged by what block momentum adds.

    Bytes: 2 (N-1)/N * 12 P a block from each worker (4 P with local_state "keep" or "reset"); with another codec what
    its file says for the P parameters, the moments being always dense.

    Args:
        beta1: Adam's on the workers, where it is larger and there are several: block momentum takes its part; None
            leaves it.
        local_state: moments at a block's start: compensate, average, keep or reset.
    """
    payload = Delta(options["local_state"], adam_only=True, beta1=options["beta1"])
    return Rule(payload=payload, outer=_momentum(options), **block_fields(options))


@takes(OuterOptions, local_state="keep")
def diloco(**options: Unpack[OuterOptions]) -> Rule:
    """DiLoCo: an outer Nesterov step on the mean displacement; the local optimizer keeps its state.

    Bytes: 2 (N-1)/N * 4 P a block from each worker (and as much again for each moment that is exchanged); with another
    codec what its file says.

    Args:
        period: H, inner steps between two outer steps (the publication takes 500 with AdamW).
        momentum: outer momentum mu; None follows from the gain.
        lr: outer learning rate nu; None follows from the gain.
        gain: nu/(1-mu): "auto" (:mod:`paceline.rules.outer.gain`), "paper" (mu = 0.9, nu = 0.7) or a number.
        ramp: blocks over which mu rises from 0.
    """
    return Rule(payload=Delta(options["local_state"]), outer=_nesterov(options), **block_fields(options))


@takes(StreamingOptions, local_state="keep", fragments=4, overlap=2, mixing=0.5, codec="e3m0")
def streaming_diloco(**options: Unpack[StreamingOptions]) -> Rule:
    """Streaming DiLoCo: DiLoCo in fragments that take turns, behind the next steps, in four bits.

    Bytes: 2 (N-1)/N * P/2 a block from each worker, and 4 bytes a group for its scale.

    Args:
        period: H, inner steps between two outer steps of a fragment (the publication takes 100).
        momentum: outer momentum mu; None follows from the gain.
        lr: outer learning rate nu; None follows from the gain.
        gain: nu/(1-mu): "auto" (:mod:`paceline.rules.outer.gain`), "paper" (mu = 0.9, nu = 0.7) or a number.
        ramp: blocks over which mu rises from 0.
    """
    payload = Delta(options["local_state"], mixing=options["mixing"])
    return Rule(payload=payload, outer=_nesterov(options), **block_fields(options))


def _momentum(options: MomentumOptions) -> BlockMomentum:
    numbers = options["momentum"], options["lr"], options["gain"]
    return BlockMomentum(*numbers, options["nesterov"], options["ramp"], options["amplify"])


def _nesterov(options: OuterOptions) -> Nesterov:
    return Nesterov(options["momentum"], options["lr"], options["gain"], options["ramp"])


BMUF = """d_n = mean_i theta_i - theta^init
Delta_n = eta Delta_{n-1} + zeta d_n
theta = theta + Delta_n                      (exported)
theta^init = theta + eta Delta_n             (Nesterov; classical: theta^init = theta)"""

BLOCKS = (
    Recipe(
        "averaging",
        "Model averaging (local SGD): the mean of the local models, every block.",
        "theta = mean_i theta_i",
        "the baseline that Chen & Huo (ICASSP 2016) start from",
        "To compare with, or with few workers and short periods: it needs a learning rate that grows with N.",
        averaging,
    ),
    Recipe(
        "bmuf",
        "Blockwise model-update filtering: averaging with block momentum.",
        BMUF,
        "K. Chen, Q. Huo, ICASSP 2016, pp. 5880-5884",
        "The network is the limit and the optimizer is SGD. Keep the learning rate of one worker, or up to twice that.",
        bmuf,
    ),
    Recipe(
        "bmuf_adam",
        "BMUF whose Adam moments are averaged and compensated.",
        BMUF
        + """
rho_n = eta rho_{n-1} + zeta tau,  kv = eta rho_n + (zeta - 1) tau
E = (mbar - b1^tau m^init) / (1 - b1^tau)
m^init = b1^kv mbar + (1 - b1^kv) E          (v likewise with b2)
k = k + tau + kv                             (bias-correction counter)
b1 = min(b1, 0.5) where N > 1""",
        "K. Chen, H. Ding, Q. Huo, ICASSP 2020",
        "The network is the limit and the optimizer is Adam or AdamW.",
        bmuf_adam,
    ),
    Recipe(
        "diloco",
        "DiLoCo: an outer Nesterov step on the mean displacement.",
        """g = mean_i (theta - theta_i)
b = mu b + g
theta = theta - nu (g + mu b)""",
        "A. Douillard et al., arXiv 2311.08105",
        "To compare with it. gain='paper' takes the published constants, which are too hot for few workers.",
        diloco,
    ),
    Recipe(
        "streaming_diloco",
        "Streaming DiLoCo: fragments in turn, behind the next steps.",
        """after step t, for the fragment p whose turn it is:
g = mean_i (theta_p - theta_i,p(t))          sent in E3M0 while training goes on
b = mu b + g,  theta_p = theta_p - nu (g + mu b)
after step t + d:  theta_i,p = alpha theta_i,p + (1 - alpha) theta_p""",
        "A. Douillard et al., arXiv 2501.18512",
        "The network is so slow that blocks must travel behind the next steps, in parts and in 4 bits.",
        streaming_diloco,
    ),
)
