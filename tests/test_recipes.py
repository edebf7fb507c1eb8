# SPDX-License-Identifier: Apache-2.0
"""Rules by name, by hand and as text, and what is said about text that makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

import paceline
from paceline import Rule, RuleError, rule_from_text
from paceline.codec import Dense
from paceline.outer import Average, BlockMomentum, Nesterov
from paceline.payload import Delta, Gradient
from paceline.recipes import make_rule
from paceline.schedule import EveryBlock, EveryStep
from paceline.topology import Flat, Ordered


def test_the_table() -> None:
    names = "sync one_bit power top_k one_bit_adam averaging bmuf bmuf_adam diloco streaming_diloco"
    assert list(paceline.RECIPES) == names.split()
    for name, recipe in paceline.RECIPES.items():
        rule = recipe.build()
        assert rule.name == recipe.name == name
        assert recipe.summary and recipe.equation and recipe.source
        assert rule.bytes_formula().startswith("2 (N-1)/N") == rule.codec.exact
        assert "P" in rule.bytes_formula()
        for part in (rule.schedule, rule.payload, rule.codec, rule.topology, rule.outer):
            assert part.describe(4)


def test_five_choices_of_each_recipe() -> None:
    def parts(text: str) -> tuple[Any, ...]:
        r = rule_from_text(text)
        return r.schedule, r.payload, r.codec, r.topology, r.outer

    assert parts("sync") == (EveryStep(), Gradient(), Dense(), Flat(), Average())
    assert parts("averaging") == (EveryBlock(16), Delta(), Dense(), Flat(), Average())
    assert parts("bmuf(period=8, reproducible=True, chunks=2)") == (
        *(EveryBlock(8), Delta(), Dense(), Ordered(2), BlockMomentum()),
    )
    assert parts("bmuf_adam")[:2] == (EveryBlock(8), Delta("compensate", adam_only=True))
    assert parts("diloco(gain='paper')")[1:] == (Delta("keep"), Dense(), Flat(), Nesterov(gain="paper"))


@pytest.mark.parametrize(
    "text",
    ["bmuf", "bmuf()", " bmuf ( period = 16 ) ", "bmuf(momentum=0.9, lr=1)", "bmuf(gain='paper', nesterov=False)"],
)
def test_text_goes_there_and_back(text: str) -> None:
    rule = rule_from_text(text)
    assert rule_from_text(rule.text()) == rule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bmf", r"there is no rule 'bmf'; there are sync, .*did you mean 'bmuf'"),
        ("sync(codec=3)", r"codec must be a word such as 'int8'.*got 3"),
        ("sync(codec='int9')", r"there is no codec 'int9'.*did you mean 'int8'"),
        ("one_bit(warmup=-1)", r"warmup must be a whole number of steps, at least 0, got -1"),
        ("top_k(warmup=True)", r"warmup must be"),
        ("streaming_diloco(mixing=1.5)", r"mixing must be a number from 0 to below 1, or None, got 1.5"),
        ("bmuf(overlap=20)", r"overlap must be .* from 0 to the period \(16\), got 20"),
        ("sync(dimensions=(2, 0))", r"dimensions must be"),
        ("bmuf(perod=3)", r"bmuf has no setting 'perod' \(did you mean 'period'\?\); it has period"),
        ("bmuf(3)", "need names, like bmuf"),
        ("bmuf(period=", "cannot read the rule"),
        ("bmuf(period=int('3'))", "the value of period .* is not a plain number"),
        ("bmuf(period=__import__('os').getpid())", "is not a plain number"),
        ("os.system('true')", "cannot read the rule"),
        ("bmuf + 1", "cannot read the rule"),
        ("", "cannot read the rule"),
        ("a\0b", "cannot read the rule"),
        ("bmuf(period=0)", "period must be .* at least 1, got 0"),
        ("bmuf(period=2.5)", "got 2.5"),
        ("bmuf(period=True)", "got True"),
        ("bmuf(warmup=-1)", "warmup must be"),
        ("bmuf(chunks=0)", "chunks must be"),
        ("bmuf(local_state='frozen')", "local_state must be one of auto, keep"),
        ("sync(period=4)", "sync has no setting 'period'"),
        ("bmuf(**{'period': 3})", "plain number|has no setting|names"),
    ],
)
def test_senseless_text_is_refused_with_help(text: str, said: str) -> None:
    with pytest.raises(RuleError, match=said):
        rule_from_text(text)


def test_a_rule_error_is_a_value_error_and_ours() -> None:
    with pytest.raises(ValueError):
        rule_from_text("nothing")
    with pytest.raises(paceline.PacelineError):
        rule_from_text("nothing")


def test_what_attach_takes() -> None:
    by_hand = Rule(EveryBlock(4), Delta(), outer=BlockMomentum(0.9, 1.0))
    assert make_rule(by_hand, {}) is by_hand
    assert make_rule("bmuf", {"period": 4, "momentum": 0.9, "lr": 1.0}) == by_hand.__class__(
        by_hand.schedule, by_hand.payload, outer=by_hand.outer, name="bmuf"
    )
    assert make_rule("bmuf(period=4)", {"ramp": 3}) == rule_from_text("bmuf(period=4, ramp=3)")
    assert make_rule("bmuf(period=4)", {"period": 5}) == rule_from_text("bmuf(period=5)")
    with pytest.raises(RuleError, match="beside a finished Rule"):
        make_rule(by_hand, {"period": 4})
    with pytest.raises(RuleError, match="must be a Rule, or text"):
        make_rule(3, {})  # type: ignore[arg-type]


def test_choices_that_do_not_go_together() -> None:
    with pytest.raises(RuleError, match="Gradient does not go with EveryBlock"):
        Rule(EveryBlock(4), Gradient())
    with pytest.raises(RuleError, match="Delta does not go with EveryStep"):
        Rule(EveryStep(), Delta())
    with pytest.raises(RuleError, match="not through BlockMomentum"):
        Rule(EveryStep(), Gradient(), outer=BlockMomentum())


def test_a_rule_by_hand_says_all_five_choices() -> None:
    text = Rule(EveryBlock(4), Delta(), outer=BlockMomentum(0.9, 1.0)).text()
    assert all(word in text for word in ("custom", "EveryBlock(period=4", "Delta", "Dense", "Flat", "BlockMomentum"))
