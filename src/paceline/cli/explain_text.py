# SPDX-License-Identifier: Apache-2.0
"""The description of a rule, for `paceline explain` and the documentation site."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.observe.reports.summary import bytes_text

if TYPE_CHECKING:
    from paceline.rules.rule import Rule

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


def numbers(rule: Rule, workers: int) -> list[tuple[str, str]]:
    """The rule's numbers, as text."""
    from paceline.rules import describe

    found = describe.numbers(rule, workers).items()
    return [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in found]


def sent(rule: Rule, workers: int, parameters: int) -> list[str]:
    """The formula of the bytes, the bytes of an exchange, and of a minibatch."""
    from paceline.rules import describe
    from paceline.rules.codec import Layout
    from paceline.rules.traffic import bytes_formula, bytes_per_block

    side = math.isqrt(parameters)  # a square matrix and a rest, for codecs that look at rows and columns
    layout = Layout.of([(side, side), (parameters - side * side,)])
    total = bytes_per_block(rule, workers=workers, parameters=layout)
    period = int(describe.numbers(rule, workers).get("period", 1))
    lines = [bytes_formula(rule), f"{bytes_text(total)} from each worker with {parameters:,} parameters"]
    if period > 1:
        lines.append(f"{bytes_text(total / period)} a minibatch, at period {period}")
    return lines
