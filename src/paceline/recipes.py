# SPDX-License-Identifier: Apache-2.0
"""Named rules: the table of methods as code, without mathematics.

Each recipe is a function that puts five choices together. `RECIPES` lists them; `rule_from_text` reads what a person
writes on a command line, as a literal call that is never evaluated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from paceline.calls import like, read_call
from paceline.codec import Codec, LowRank, OneBit, TopK, Warmed, codec_from_text
from paceline.errors import RuleError
from paceline.outer import Average, BlockMomentum, FrozenAdam, Nesterov
from paceline.payload import Delta, FirstMoment, Gradient
from paceline.rule import Rule
from paceline.schedule import EveryBlock, EveryStep
from paceline.topology import Flat, Hierarchical, Ordered, Topology

Dimensions = str | tuple[int, ...] | None


def _carried(
    codec: Codec | str, warmup: int, dimensions: Dimensions, reproducible: bool, chunks: int
) -> dict[str, Any]:
    """How a payload is written, and over which route."""
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise RuleError(f"warmup must be a whole number of steps, at least 0, got {warmup!r}")
    if not isinstance(codec, str) and not hasattr(codec, "exchange"):
        raise RuleError(f"codec must be a word such as 'int8' or 'low_rank(rank=2)', got {codec!r}")
    written = codec_from_text(codec) if isinstance(codec, str) else codec
    route: Topology
    if dimensions is not None:
        route = Hierarchical(dimensions, chunks, reproducible)  # type: ignore[arg-type]
    else:
        route = Ordered(chunks) if reproducible else Flat(chunks)
    return {"codec": Warmed(written, warmup) if warmup else written, "topology": route}


def _between(within: str, codec: str, dimensions: Dimensions, reproducible: bool, chunks: int) -> dict[str, Any]:
    """The same for blocks; between hosts, each process of a host carries its share of what the host sends."""
    dimensions = "hosts" if within and dimensions is None else dimensions
    return {"within": within, **_carried(codec, 0, dimensions, reproducible, chunks)}


def sync(
    *, codec: str = "dense", warmup: int = 0, dimensions: Dimensions = None, reproducible: bool = False, chunks: int = 8
) -> Rule:
    """Synchronous SGD: the workers' mean gradient goes to the optimizer, every step.

    Bytes: 2 (N-1)/N * 4 P a step from each worker; with another codec what its file says.

    Args:
        codec: how gradients are written: dense, bf16, fp16, int8, e3m0, one_bit, sign, low_rank, top_k.
        warmup: dense exchanges before the codec begins.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order, so that the bits depend on nothing but the gradients.
        chunks: pieces into which an exchange is cut.
    """
    carried = _carried(codec, warmup, dimensions, reproducible, chunks)
    return Rule(EveryStep(), Gradient(), outer=Average(), **carried)


def one_bit(
    *,
    warmup: int = 100,
    feedback: bool = True,
    dimensions: Dimensions = None,
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """1-bit SGD: the gradient's signs and two levels a column, with what was not sent added to the next gradient.

    Bytes: 2 (N-1)/N * (P/8 + 8 C) a step from each worker, C columns.

    Args:
        warmup: dense steps before the first of one bit.
        feedback: keep what was not sent, on the workers and on the owners of the slices.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order in the warm-up (one bit always does).
        chunks: pieces into which an exchange is cut.
    """
    carried = _carried(OneBit(feedback), warmup, dimensions, reproducible, chunks)
    return Rule(EveryStep(), Gradient(), outer=Average(), **carried)


def power(
    *,
    rank: int = 4,
    warmup: int = 100,
    feedback: bool = True,
    dimensions: Dimensions = None,
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """PowerSGD: every matrix of gradients as the product of two thin ones.

    Bytes: 2 (N-1)/N * 4 r (a + b) a step from each worker for a matrix of a x b; vectors and small matrices dense.

    Args:
        rank: r, columns of the thin matrices.
        warmup: dense steps before.
        feedback: keep what was not sent.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut, between tensors.
    """
    carried = _carried(LowRank(rank=rank, feedback=feedback), warmup, dimensions, reproducible, chunks)
    return Rule(EveryStep(), Gradient(), outer=Average(), **carried)


def top_k(
    *,
    ratio: float = 0.01,
    momentum: float = 0.0,
    nesterov: bool = False,
    warmup: int = 100,
    feedback: bool = True,
    dimensions: Dimensions = None,
    reproducible: bool = False,
    chunks: int = 8,
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
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order (top-k always does).
        chunks: pieces into which an exchange is cut.
    """
    codec = TopK(ratio, momentum, nesterov, warmup or (), feedback)
    return Rule(EveryStep(), Gradient(), outer=Average(), **_carried(codec, 0, dimensions, reproducible, chunks))


def one_bit_adam(
    *,
    warmup: int = 1000,
    codec: str = "sign",
    dimensions: Dimensions = None,
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """1-bit Adam: Adam's first moment by one bit a number, the second frozen after a warm-up of plain Adam.

    Gradients are exchanged before the step and not while backward goes on, because the moment takes what the program
    made of them (clipping). A good warm-up is 15 to 25 % of all steps.

    Bytes: 2 (N-1)/N * 4 P a step from each worker in the warm-up, then 2 (N-1)/N * (P/8 + 4 C), C columns.

    Args:
        warmup: steps of plain Adam with dense gradients.
        codec: how the moment is written.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order in the warm-up.
        chunks: pieces into which an exchange is cut.
    """
    payload = FirstMoment(warmup)
    carried = _carried(codec, warmup, dimensions, reproducible, chunks)
    return Rule(EveryStep(), payload, outer=FrozenAdam(), **carried)


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
    carried = _between(within, codec, dimensions, reproducible, chunks)
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

    Args:
        period: tau, minibatches of a block on each worker.
        momentum: block momentum eta; None follows from the gain.
        lr: block learning rate zeta; None follows from the gain.
        gain: steady gain zeta/(1-eta): "auto" (N^0.7 with zeta 0.7), "paper" (eta = 1-1/N, zeta = 1) or a number.
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
    carried = _between(within, codec, dimensions, reproducible, chunks)
    return Rule(schedule, Delta(local_state), outer=BlockMomentum(momentum, lr, gain, nesterov, ramp), **carried)


def bmuf_adam(
    *,
    period: int = 8,
    momentum: float | None = None,
    lr: float | None = None,
    gain: float | str = "auto",
    nesterov: bool = True,
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
    its file says for the P parameters, the moments being always dense. A smaller beta1 than Adam's 0.9 suits it.

    Args:
        period: tau, minibatches of a block on each worker.
        momentum: block momentum eta; None follows from the gain.
        lr: block learning rate zeta; None follows from the gain.
        gain: steady gain zeta/(1-eta): "auto" (N^0.7 with zeta 0.7), "paper" (eta = 1-1/N, zeta = 1) or a number.
        nesterov: True for Nesterov block momentum, False for classical.
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
    carried = _between(within, codec, dimensions, reproducible, chunks)
    outer = BlockMomentum(momentum, lr, gain, nesterov, ramp)
    return Rule(schedule, Delta(local_state, adam_only=True), outer=outer, **carried)


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
        gain: steady gain nu/(1-mu): "auto" (N^0.7 with nu 0.7), "paper" (mu = 0.9, nu = 0.7) or a number.
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
    carried = _between(within, codec, dimensions, reproducible, chunks)
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
        gain: steady gain nu/(1-mu): "auto" (N^0.7 with nu 0.7), "paper" (mu = 0.9, nu = 0.7) or a number.
        warmup: synchronous steps before the first block.
        ramp: blocks over which mu rises from 0.
        local_state: what a block starts from in the local optimizer: auto, keep, reset, average, compensate.
        fragments: parts of the model that are exchanged one after another over the block.
        overlap: minibatches that are made while an exchange is under way; 0 waits for it.
        mixing: alpha, the share of the local parameters that stays when an exchange lands; None keeps the progress made
            meanwhile instead (:mod:`paceline.payload`).
        codec: how the delta is written: dense, bf16, fp16, int8, e3m0, one_bit, sign, low_rank, top_k.
        within: "host" makes the processes of a host one worker, which makes synchronous steps inside.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    schedule = EveryBlock(period, warmup, fragments, overlap)
    carried = _between(within, codec, dimensions, reproducible, chunks)
    return Rule(schedule, Delta(local_state, mixing=mixing), outer=Nesterov(momentum, lr, gain, ramp), **carried)


@dataclass(frozen=True)
class Recipe:
    """A named rule and where it comes from.

    Attributes:
        name: as one writes it.
        summary: one line.
        equation: the method in a few lines.
        source: the publication.
        function: what builds the rule.
    """

    name: str
    summary: str
    equation: str
    source: str
    function: Callable[..., Rule]

    def build(self, **arguments: Any) -> Rule:
        """The rule with `arguments`; `RuleError` for one that does not exist or has a senseless value."""
        known = list(inspect.signature(self.function).parameters)
        for name in arguments:
            if name not in known:
                raise RuleError(f"{self.name} has no setting {name!r}{like(name, known)}; it has {', '.join(known)}")
        return replace(self.function(**arguments), name=self.name, arguments=dict(arguments))


_BMUF = """d_n = mean_i theta_i - theta^init
Delta_n = eta Delta_{n-1} + zeta d_n
theta = theta + Delta_n                      (exported)
theta^init = theta + eta Delta_n             (Nesterov; classical: theta^init = theta)"""

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "sync",
            "Synchronous SGD: the mean gradient, every step.",
            "g = mean_i g_i, then the optimizer's own step",
            "large batches: Goyal et al. 2017, arXiv 1706.02677",
            sync,
        ),
        Recipe(
            "one_bit",
            "1-bit SGD: one bit a number of the gradient, fed back.",
            """x_i = g_i + r_i,  q_i = Q(x_i),  r_i = x_i - q_i            (each worker)
s = sum_i q_i + o,  total = Q(s),  o = s - Q(s)             (the owner of each slice)
g = total / N, then the optimizer's own step""",
            "F. Seide et al., Interspeech 2014",
            one_bit,
        ),
        Recipe(
            "power",
            "PowerSGD: gradients of low rank, with error feedback.",
            """M_i = g_i + e_i
P = orthonormal(sum_i M_i Q),  Q = sum_i M_i^T P
g = P Q^T / N,  e_i = M_i - P (M_i^T P)^T""",
            "T. Vogels et al., NeurIPS 2019, arXiv 1905.13727",
            power,
        ),
        Recipe(
            "top_k",
            "Deep gradient compression: the largest numbers of the gradient.",
            """u = m u + g,  v = v + u                      (each worker)
send the k largest |v|; there u = v = 0
g = mean of what was sent""",
            "Y. Lin et al., ICLR 2018, arXiv 1712.01887",
            top_k,
        ),
        Recipe(
            "one_bit_adam",
            "1-bit Adam: the first moment in bits, the second frozen.",
            """m_i = b1 m + (1 - b1) g_i
m = Q(mean_i Q(m_i + e_i) + e_s)
theta = theta - lr (mhat / (sqrt(vhat_frozen) + eps) + wd theta)""",
            "H. Tang et al., arXiv 2102.02888",
            one_bit_adam,
        ),
        Recipe(
            "averaging",
            "Model averaging (local SGD): the mean of the local models, every block.",
            "theta = mean_i theta_i",
            "the baseline that Chen & Huo (ICASSP 2016) start from",
            averaging,
        ),
        Recipe(
            "bmuf",
            "Blockwise model-update filtering: averaging with block momentum.",
            _BMUF,
            "K. Chen, Q. Huo, ICASSP 2016, pp. 5880-5884",
            bmuf,
        ),
        Recipe(
            "bmuf_adam",
            "BMUF whose Adam moments are averaged and compensated.",
            _BMUF
            + """
rho_n = eta rho_{n-1} + zeta tau,  kv = eta rho_n + (zeta - 1) tau
E = (mbar - b1^tau m^init) / (1 - b1^tau)
m^init = b1^kv mbar + (1 - b1^kv) E          (v likewise with b2)
k = k + tau + kv                             (bias-correction counter)""",
            "K. Chen, H. Ding, Q. Huo, ICASSP 2020",
            bmuf_adam,
        ),
        Recipe(
            "diloco",
            "DiLoCo: an outer Nesterov step on the mean displacement.",
            """g = mean_i (theta - theta_i)
b = mu b + g
theta = theta - nu (g + mu b)""",
            "A. Douillard et al., arXiv 2311.08105",
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
            streaming_diloco,
        ),
    )
}


def recipe(name: str) -> Recipe:
    """The recipe called `name`; `RuleError` with the names there are."""
    if name not in RECIPES:
        names = list(RECIPES)
        raise RuleError(f"there is no rule {name!r}; there are {', '.join(names)}{like(name, names)}")
    return RECIPES[name]


def rule_from_text(text: str) -> Rule:
    """Read `bmuf`, `bmuf()` or `bmuf(period=16, momentum=0.9)`; nothing in it is ever evaluated."""
    name, arguments = read_call(text, "rule", "bmuf(period=16, momentum=0.9)")
    return recipe(name).build(**arguments)


def make_rule(rule: Rule | str | None, arguments: dict[str, Any]) -> Rule:
    """A rule from what `attach` was given: a `Rule`, a name with settings, or text."""
    if isinstance(rule, Rule):
        if arguments:
            raise RuleError(
                f"settings {', '.join(arguments)} were given beside a finished Rule; put them into the Rule, "
                "or give the rule by name"
            )
        return rule
    if not isinstance(rule, str):
        raise RuleError(f"rule must be a Rule, or text such as 'bmuf(period=16)', got {rule!r}")
    if rule.isidentifier():
        return recipe(rule).build(**arguments)
    built = rule_from_text(rule)
    if not arguments:
        return built
    return recipe(built.name).build(**{**built.arguments, **arguments})
