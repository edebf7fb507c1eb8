# SPDX-License-Identifier: Apache-2.0
"""Named rules: the table of methods as code, without mathematics.

Each recipe is a function that puts five choices together. `RECIPES` lists them; `rule_from_text` reads what a person
writes on a command line, as a literal call that is never evaluated.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import RuleError
from paceline.outer import Average, BlockMomentum, Nesterov, Outer
from paceline.payload import Delta, Gradient
from paceline.rule import Rule
from paceline.schedule import EveryBlock, EveryStep
from paceline.topology import Flat, Ordered, Topology


def _route(reproducible: bool, chunks: int) -> Topology:
    return Ordered(chunks) if reproducible else Flat(chunks)


def sync(*, reproducible: bool = False, chunks: int = 8) -> Rule:
    """Synchronous SGD: the workers' mean gradient goes to the optimizer, every step.

    Bytes: 2 (N-1)/N * 4 P a step from each worker.

    Args:
        reproducible: sum in rank order, so that the bits depend on nothing but the gradients.
        chunks: pieces into which an exchange is cut.
    """
    return Rule(EveryStep(), Gradient(), topology=_route(reproducible, chunks), outer=Average())


def averaging(
    *, period: int = 16, warmup: int = 0, local_state: str = "auto", reproducible: bool = False, chunks: int = 8
) -> Rule:
    """Model averaging (local SGD): every block starts from the mean of the local models.

    Bytes: 2 (N-1)/N * 4 P a block from each worker (and as much again for each moment that rides along).

    Args:
        period: tau, minibatches of a block on each worker.
        warmup: synchronous steps before the first block.
        local_state: what a block starts from in the local optimizer: auto, keep, reset, average, compensate.
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    return _block(period, warmup, local_state, reproducible, chunks, Average())


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
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """Blockwise model-update filtering: block momentum over the mean displacement.

    Bytes: 2 (N-1)/N * 4 P a block from each worker (and as much again for each moment that rides along).

    Args:
        period: tau, minibatches of a block on each worker.
        momentum: block momentum eta; None follows from the gain.
        lr: block learning rate zeta; None follows from the gain.
        gain: steady gain zeta/(1-eta): "auto" (N^0.7 with zeta 0.7), "paper" (eta = 1-1/N, zeta = 1) or a number.
        nesterov: True for Nesterov block momentum, False for classical.
        warmup: synchronous steps before the first block.
        ramp: blocks over which eta rises from 0.
        local_state: what a block starts from in the local optimizer: auto, keep, reset, average, compensate.
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    outer = BlockMomentum(momentum, lr, gain, nesterov, ramp)
    return _block(period, warmup, local_state, reproducible, chunks, outer)


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
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """BMUF for Adam and AdamW: the moments are averaged too, and aged by what block momentum adds.

    Bytes: 2 (N-1)/N * 12 P a block from each worker (4 P with local_state "keep" or "reset"). A smaller beta1 than
    Adam's 0.9 suits it.

    Args:
        period: tau, minibatches of a block on each worker.
        momentum: block momentum eta; None follows from the gain.
        lr: block learning rate zeta; None follows from the gain.
        gain: steady gain zeta/(1-eta): "auto" (N^0.7 with zeta 0.7), "paper" (eta = 1-1/N, zeta = 1) or a number.
        nesterov: True for Nesterov block momentum, False for classical.
        warmup: synchronous steps before the first block.
        ramp: blocks over which eta rises from 0.
        local_state: moments at a block's start: compensate, average, keep or reset.
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    outer = BlockMomentum(momentum, lr, gain, nesterov, ramp)
    rule = _block(period, warmup, local_state, reproducible, chunks, outer)
    return replace(rule, payload=Delta(local_state, adam_only=True))


def diloco(
    *,
    period: int = 16,
    momentum: float | None = None,
    lr: float | None = None,
    gain: float | str = "auto",
    warmup: int = 0,
    ramp: int = 0,
    local_state: str = "keep",
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """DiLoCo: an outer Nesterov step on the mean displacement; the local optimizer keeps its state.

    Bytes: 2 (N-1)/N * 4 P a block from each worker (and as much again for each moment that rides along).

    Args:
        period: H, inner steps between two outer steps (the publication takes 500 with AdamW).
        momentum: outer momentum mu; None follows from the gain.
        lr: outer learning rate nu; None follows from the gain.
        gain: steady gain nu/(1-mu): "auto" (N^0.7 with nu 0.7), "paper" (mu = 0.9, nu = 0.7) or a number.
        warmup: synchronous steps before the first block.
        ramp: blocks over which mu rises from 0.
        local_state: what a block starts from in the local optimizer: auto, keep, reset, average, compensate.
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    return _block(period, warmup, local_state, reproducible, chunks, Nesterov(momentum, lr, gain, ramp))


def _block(period: int, warmup: int, local_state: str, reproducible: bool, chunks: int, outer: Outer) -> Rule:
    route = _route(reproducible, chunks)
    return Rule(EveryBlock(period, warmup), Delta(local_state), topology=route, outer=outer)


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
                raise RuleError(f"{self.name} has no setting {name!r}; it has {', '.join(known)}{_like(name, known)}")
        return replace(self.function(**arguments), name=self.name, arguments=dict(arguments))


def _like(word: str, words: list[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


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
            "the standard method; large batches: Goyal et al. 2017, arXiv 1706.02677",
            sync,
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
    )
}


def recipe(name: str) -> Recipe:
    """The recipe called `name`; `RuleError` with the names there are."""
    if name not in RECIPES:
        names = list(RECIPES)
        raise RuleError(f"there is no rule {name!r}; there are {', '.join(names)}{_like(name, names)}")
    return RECIPES[name]


def rule_from_text(text: str) -> Rule:
    """Read `bmuf`, `bmuf()` or `bmuf(period=16, momentum=0.9)`; nothing in it is ever evaluated."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise RuleError(f"cannot read the rule {text!r}; write it like bmuf(period=16, momentum=0.9)") from error
    if isinstance(tree, ast.Name):
        return recipe(tree.id).build()
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise RuleError(f"cannot read the rule {text!r}; write it like bmuf(period=16, momentum=0.9)")
    if tree.args:
        raise RuleError(f"the settings of {text!r} need names, like {tree.func.id}(period=16)")
    arguments: dict[str, Any] = {}
    for keyword in tree.keywords:
        try:
            arguments[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise RuleError(
                f"the value of {keyword.arg} in {text!r} is not a plain number, word in quotes, True, False or None"
            ) from error
    return recipe(tree.func.id).build(**arguments)


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
