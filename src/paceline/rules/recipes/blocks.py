# SPDX-License-Identifier: Apache-2.0
"""Recipes that exchange after blocks of minibatches, all workers together."""

from __future__ import annotations

from paceline.rules.outer import Average, BlockMomentum, Nesterov
from paceline.rules.payload import Delta
from paceline.rules.recipes.base import Dimensions, Recipe, between
from paceline.rules.rule import Rule
from paceline.rules.schedule import EveryBlock

ADAM_BETA1 = 0.5
"""Better than 0.9 under block momentum, on lines and on speech (records/2026-11-22_lines, 2026-11-22_speech)."""


def averaging(
    *,
    period: int = 16,
    warmup: int = 0,
    local_state: str = "auto",
    fragments: int = 1,
    overlap: int = 0,
    codec: str = "dense",
    within: str = "",
    dimensions: Dimensions = None,
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """Model averaging (local SGD): every block starts from the mean of the local models.

    Bytes: 2 (N-1)/N * 4 P a block from each worker (and as much again for each moment that rides along); with another
    codec what its file says.

    Args:
        period: tau, minibatches of a block on each worker.
        warmup: synchronous steps before the first block.
        local_state: what a block starts from in the local optimizer: auto, keep, reset, average, compensate.
        fragments: parts of the model that are exchanged one after another over the block.
        overlap: minibatches that are made while an exchange is under way; 0 waits for it.
        codec: how the delta is written: dense, bf16, fp16, int8, e3m0, one_bit, sign, low_rank, top_k.
        within: "host" makes the processes of a host one worker, which makes synchronous steps inside.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    schedule = EveryBlock(period, warmup, fragments, overlap)
    carried = between(within, codec, dimensions, reproducible, chunks)
    return Rule(schedule, Delta(local_state), outer=Average(), **carried)


def bmuf(
    *,
    period: int = 16,
    momentum: float | None = None,
    lr: float | None = None,
    gain: float | str = "auto",
    nesterov: bool = True,
    warmup: int = 0,
    ramp: int = 0,
    local_state: str = "auto",
    fragments: int = 1,
    overlap: int = 0,
    codec: str = "dense",
    within: str = "",
    dimensions: Dimensions = None,
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """Blockwise model-update filtering: block momentum over the mean displacement.

    Bytes: 2 (N-1)/N * 4 P a block from each worker (and as much again for each moment that rides along); with another
    codec what its file says.

    >>> from paceline.rules.describe import numbers
    >>> from paceline.rules.recipes import bmuf
    >>> round(numbers(bmuf(period=8), workers=4)["gain"], 3)  # 4 to the power of 0.7
    2.639
    >>> numbers(bmuf(gain="paper"), workers=4)["momentum"]
    0.75

    Args:
        period: tau, minibatches of a block on each worker.
        momentum: block momentum eta; None follows from the gain.
        lr: block learning rate zeta; None follows from the gain.
        gain: zeta/(1-eta): "auto" (:mod:`paceline.rules.outer.gain`), "paper" (eta = 1-1/N, zeta = 1) or a number.
        nesterov: True for Nesterov block momentum, False for classical.
        warmup: synchronous steps before the first block.
        ramp: blocks over which eta rises from 0.
        local_state: what a block starts from in the local optimizer: auto, keep, reset, average, compensate.
        fragments: parts of the model that are exchanged one after another over the block.
        overlap: minibatches that are made while an exchange is under way; 0 waits for it.
        codec: how the delta is written: dense, bf16, fp16, int8, e3m0, one_bit, sign, low_rank, top_k.
        within: "host" makes the processes of a host one worker, which makes synchronous steps inside.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    schedule = EveryBlock(period, warmup, fragments, overlap)
    carried = between(within, codec, dimensions, reproducible, chunks)
    return Rule(schedule, Delta(local_state), outer=BlockMomentum(momentum, lr, gain, nesterov, ramp), **carried)


def bmuf_adam(
    *,
    period: int = 8,
    momentum: float | None = None,
    lr: float | None = None,
    gain: float | str = "auto",
    nesterov: bool = True,
    beta1: float | None = ADAM_BETA1,
    warmup: int = 0,
    ramp: int = 0,
    local_state: str = "compensate",
    fragments: int = 1,
    overlap: int = 0,
    codec: str = "dense",
    within: str = "",
    dimensions: Dimensions = None,
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """BMUF for Adam and AdamW: the moments are averaged too, and aged by what block momentum adds.

    Bytes: 2 (N-1)/N * 12 P a block from each worker (4 P with local_state "keep" or "reset"); with another codec what
    its file says for the P parameters, the moments being always dense.

    Args:
        period: tau, minibatches of a block on each worker.
        momentum: block momentum eta; None follows from the gain.
        lr: block learning rate zeta; None follows from the gain.
        gain: zeta/(1-eta): "auto" (:mod:`paceline.rules.outer.gain`), "paper" (eta = 1-1/N, zeta = 1) or a number.
        nesterov: True for Nesterov block momentum, False for classical.
        beta1: Adam's on the workers, where it is larger and there are several: block momentum takes its part; None
            leaves it.
        warmup: synchronous steps before the first block.
        ramp: blocks over which eta rises from 0.
        local_state: moments at a block's start: compensate, average, keep or reset.
        fragments: parts of the model that are exchanged one after another over the block.
        overlap: minibatches that are made while an exchange is under way; 0 waits for it.
        codec: how the delta is written: dense, bf16, fp16, int8, e3m0, one_bit, sign, low_rank, top_k.
        within: "host" makes the processes of a host one worker, which makes synchronous steps inside.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    schedule = EveryBlock(period, warmup, fragments, overlap)
    carried = between(within, codec, dimensions, reproducible, chunks)
    outer = BlockMomentum(momentum, lr, gain, nesterov, ramp)
    return Rule(schedule, Delta(local_state, adam_only=True, beta1=beta1), outer=outer, **carried)


def diloco(
    *,
    period: int = 16,
    momentum: float | None = None,
    lr: float | None = None,
    gain: float | str = "auto",
    warmup: int = 0,
    ramp: int = 0,
    local_state: str = "keep",
    fragments: int = 1,
    overlap: int = 0,
    codec: str = "dense",
    within: str = "",
    dimensions: Dimensions = None,
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """DiLoCo: an outer Nesterov step on the mean displacement; the local optimizer keeps its state.

    Bytes: 2 (N-1)/N * 4 P a block from each worker (and as much again for each moment that rides along); with another
    codec what its file says.

    Args:
        period: H, inner steps between two outer steps (the publication takes 500 with AdamW).
        momentum: outer momentum mu; None follows from the gain.
        lr: outer learning rate nu; None follows from the gain.
        gain: nu/(1-mu): "auto" (:mod:`paceline.rules.outer.gain`), "paper" (mu = 0.9, nu = 0.7) or a number.
        warmup: synchronous steps before the first block.
        ramp: blocks over which mu rises from 0.
        local_state: what a block starts from in the local optimizer: auto, keep, reset, average, compensate.
        fragments: parts of the model that are exchanged one after another over the block.
        overlap: minibatches that are made while an exchange is under way; 0 waits for it.
        codec: how the delta is written: dense, bf16, fp16, int8, e3m0, one_bit, sign, low_rank, top_k.
        within: "host" makes the processes of a host one worker, which makes synchronous steps inside.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    schedule = EveryBlock(period, warmup, fragments, overlap)
    carried = between(within, codec, dimensions, reproducible, chunks)
    return Rule(schedule, Delta(local_state), outer=Nesterov(momentum, lr, gain, ramp), **carried)


def streaming_diloco(
    *,
    period: int = 16,
    momentum: float | None = None,
    lr: float | None = None,
    gain: float | str = "auto",
    warmup: int = 0,
    ramp: int = 0,
    local_state: str = "keep",
    fragments: int = 4,
    overlap: int = 2,
    mixing: float | None = 0.5,
    codec: str = "e3m0",
    within: str = "",
    dimensions: Dimensions = None,
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """Streaming DiLoCo: DiLoCo in fragments that take turns, behind the next steps, in four bits.

    Bytes: 2 (N-1)/N * P/2 a block from each worker, and 4 bytes a group for its scale.

    Args:
        period: H, inner steps between two outer steps of a fragment (the publication takes 100).
        momentum: outer momentum mu; None follows from the gain.
        lr: outer learning rate nu; None follows from the gain.
        gain: nu/(1-mu): "auto" (:mod:`paceline.rules.outer.gain`), "paper" (mu = 0.9, nu = 0.7) or a number.
        warmup: synchronous steps before the first block.
        ramp: blocks over which mu rises from 0.
        local_state: what a block starts from in the local optimizer: auto, keep, reset, average, compensate.
        fragments: parts of the model that are exchanged one after another over the block.
        overlap: minibatches that are made while an exchange is under way; 0 waits for it.
        mixing: alpha, the share of the local parameters that stays when an exchange lands; None keeps the progress made
            meanwhile instead (:mod:`paceline.rules.payload`).
        codec: how the delta is written: dense, bf16, fp16, int8, e3m0, one_bit, sign, low_rank, top_k.
        within: "host" makes the processes of a host one worker, which makes synchronous steps inside.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    schedule = EveryBlock(period, warmup, fragments, overlap)
    carried = between(within, codec, dimensions, reproducible, chunks)
    return Rule(schedule, Delta(local_state, mixing=mixing), outer=Nesterov(momentum, lr, gain, ramp), **carried)


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
