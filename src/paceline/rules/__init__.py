# SPDX-License-Identifier: Apache-2.0
"""A rule and its parts: the five choices that make a parallel training method, all importable from here.

::

    rule       Rule: the five choices together
    schedule/  when workers exchange
    payload    what they exchange
    codec/     how it is encoded
    topology/  over which route it goes
    outer/     how the result is applied
    recipes/   named rules, the published methods
"""

from __future__ import annotations

from paceline.rules.codec import (
    CODECS,
    E3M0,
    Codec,
    Dense,
    Half,
    Int8,
    LowRank,
    OneBit,
    Sign,
    TopK,
    TwoSided,
    Warmed,
    codec_from_text,
)
from paceline.rules.outer import (
    AdaDelay,
    Arrival,
    Average,
    BlockMomentum,
    DelayCompensated,
    Elastic,
    FrozenAdam,
    Nesterov,
    Outer,
    Push,
    Rescaled,
    Share,
    StalenessAware,
    Sum,
    TunedMomentum,
)
from paceline.rules.payload import Delta, FirstMoment, Gradient, Parameters
from paceline.rules.recipes import RECIPES, Recipe, make_rule, recipe, rule_from_text
from paceline.rules.rule import BlockSettings, Rule
from paceline.rules.schedule import Bounded, EveryBlock, EveryStep, Pace, Paced, Schedule
from paceline.rules.topology import Flat, Hierarchical, Ordered, Route, Sharded, Topology

__all__ = [
    "CODECS",
    "E3M0",
    "RECIPES",
    "AdaDelay",
    "Arrival",
    "Average",
    "BlockMomentum",
    "BlockSettings",
    "Bounded",
    "Codec",
    "DelayCompensated",
    "Delta",
    "Dense",
    "Elastic",
    "EveryBlock",
    "EveryStep",
    "FirstMoment",
    "Flat",
    "FrozenAdam",
    "Gradient",
    "Half",
    "Hierarchical",
    "Int8",
    "LowRank",
    "Nesterov",
    "OneBit",
    "Ordered",
    "Outer",
    "Pace",
    "Paced",
    "Parameters",
    "Push",
    "Recipe",
    "Rescaled",
    "Route",
    "Rule",
    "Schedule",
    "Sharded",
    "Share",
    "Sign",
    "StalenessAware",
    "Sum",
    "TopK",
    "Topology",
    "TunedMomentum",
    "TwoSided",
    "Warmed",
    "codec_from_text",
    "make_rule",
    "recipe",
    "rule_from_text",
]
