# SPDX-License-Identifier: Apache-2.0
"""The numbers of a rule, from each of its parts."""

from __future__ import annotations

from typing import Any

from paceline.rules.rule import Rule

Numbers = dict[str, float | int | str]
LATER = 1 << 30
"""A block after any ramp."""


CHOICES = {
    "schedule": "when do workers exchange?",
    "payload": "what is exchanged?",
    "codec": "how is it written on the wire?",
    "topology": "over which route?",
    "outer": "how is the result applied?",
}


def choices(rule: Rule, workers: int) -> list[tuple[str, str, str]]:
    """The five choices of a rule: name, question, answer."""
    return [(name, question, getattr(rule, name).describe(workers)) for name, question in CHOICES.items()]


def numbers(rule: Rule, workers: int) -> Numbers:
    """The numbers of `rule` with N = `workers`, after any ramp.

    >>> from paceline import rule_from_text
    >>> numbers(rule_from_text("bmuf(momentum=0.75, lr=1.0)"), workers=4)["gain"]
    4.0
    """
    of_rule = rule.schedule.numbers() | _of_outer(rule.outer, workers)
    if rule.schedule.exchanges_blocks:
        of_rule["local_state"] = rule.delta.local_state
    if rule.settings.within:
        of_rule["within"] = rule.settings.within
    if rule.settings.ema:
        of_rule["ema"] = rule.settings.ema
    if rule.settings.rate_exponent:
        of_rule["rate_exponent"] = rule.settings.rate_exponent
    return of_rule


def _of_outer(outer: Any, workers: int) -> Numbers:
    """An outer step's own numbers; if it has none, its momentum, rate and gain."""
    if hasattr(outer, "numbers"):
        of_outer: Numbers = outer.numbers(workers)
        return of_outer
    eta, zeta = outer.momentum_at(LATER, workers), outer.lr_at(LATER, workers)
    return {"momentum": eta, "lr": zeta, "gain": zeta / (1 - eta), "ramp": int(getattr(outer, "ramp", 0))}
