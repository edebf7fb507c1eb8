# SPDX-License-Identifier: Apache-2.0
"""Named rules: the published methods.

Each recipe is a function that combines five choices. `RECIPES` lists them; `rule_from_text` parses one from text.
"""

from __future__ import annotations

from typing import Any

from paceline.core.parse import like, read_call
from paceline.errors import RuleError
from paceline.rules.recipes.asynchronous import (
    ASYNCHRONOUS,
    adadelay,
    asgd,
    dc_asgd,
    easgd,
    momentum_tuned,
    ssp,
    staleness_aware,
)
from paceline.rules.recipes.auto import AUTO, auto
from paceline.rules.recipes.blocks import BLOCKS, averaging, bmuf, bmuf_adam, diloco, streaming_diloco
from paceline.rules.recipes.lockstep import LOCKSTEP, one_bit, one_bit_adam, power, sync, top_k
from paceline.rules.recipes.options import Dimensions, Recipe
from paceline.rules.recipes.own import own_rule
from paceline.rules.rule import Rule

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*AUTO, *LOCKSTEP, *BLOCKS, *ASYNCHRONOUS)}

__all__ = [
    "RECIPES",
    "Dimensions",
    "Recipe",
    "adadelay",
    "asgd",
    "auto",
    "averaging",
    "bmuf",
    "bmuf_adam",
    "dc_asgd",
    "diloco",
    "easgd",
    "make_rule",
    "momentum_tuned",
    "one_bit",
    "one_bit_adam",
    "power",
    "recipe",
    "rule_from_text",
    "ssp",
    "staleness_aware",
    "streaming_diloco",
    "sync",
    "top_k",
]


def recipe(name: str) -> Recipe:
    """The recipe called `name`; raises `RuleError` with the known names."""
    if name not in RECIPES:
        names = list(RECIPES)
        raise RuleError(f"there is no rule {name!r}; there are {', '.join(names)}{like(name, names)}")
    return RECIPES[name]


def rule_from_text(text: str) -> Rule:
    """Read `bmuf`, `bmuf()` or `bmuf(period=16, momentum=0.9)`; nothing in it is ever evaluated.

    >>> from paceline import rule_from_text
    >>> rule_from_text("bmuf(period=8)").schedule.period
    8
    >>> rule_from_text("bmfu")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    paceline.errors.RuleError: there is no rule 'bmfu'; ... (did you mean 'bmuf'?)
    """
    name, arguments = read_call(text, "rule", "bmuf(period=16, momentum=0.9)")
    return recipe(name).build(**arguments)


def make_rule(rule: Rule | str | None, arguments: dict[str, Any]) -> Rule:
    """A rule from the arguments of `attach`: a `Rule`, a name with settings, or text, also one of `module:name`."""
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
    if (own := own_rule(rule, arguments)) is not None:
        return own
    built = rule_from_text(rule)
    if not arguments:
        return built
    return recipe(built.name).build(**{**built.arguments, **arguments})
