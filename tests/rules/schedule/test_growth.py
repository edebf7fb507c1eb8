# SPDX-License-Identifier: Apache-2.0
"""The number of workers that a rule asks for: as the rule's text says it, and who refuses it."""

from __future__ import annotations

import pytest

import paceline
from paceline.errors import RuleError, UnsupportedError
from paceline.rules.recipes import rule_from_text
from paceline.rules.schedule import GivenGrowth, Growth
from paceline.rules.schedule.growth import make_growth, rate_factor
from tests.helpers import make_net, momentum_sgd


@pytest.mark.parametrize("name", ["bmuf", "bmuf_adam", "averaging", "diloco", "streaming_diloco", "auto"])
def test_block_recipes_take_it_and_write_it_down_only_then(name: str) -> None:
    plain, grown = rule_from_text(name), rule_from_text(f"{name}(grow='auto')")
    assert plain.text() == f"{name}()" and plain.schedule.grow is None
    assert grown.text() == f"{name}(grow='auto')" and grown.schedule.grow == Growth()
    assert "grow" not in repr(plain.schedule) and "2 workers at first" in grown.schedule.describe(8)
    assert rule_from_text(grown.text()) == grown


def test_stages_of_minibatches_of_all_workers() -> None:
    growth = make_growth("2:4000, 8 : 16000", rate_exponent=0.5)
    assert growth == GivenGrowth(((2, 4000), (8, 16000)), 0.5)
    asked = [growth.next(2, 64, 1.0, 1, minibatches) for minibatches in (0, 3999, 4000, 15999, 16000)]
    assert asked == [2, 2, 8, 8, 64]
    assert growth.next(8, 6, 1.0, 1, 5000) == 6  # no more than there are
    assert growth.next(16, 64, 1.0, 1, 5000) == 16  # never fewer than before


def test_the_rate_of_k_workers() -> None:
    assert rate_factor(1) == rate_factor(64, 0.0) == 1
    assert rate_factor(16, 0.5) == 4
    assert rate_factor(8) == pytest.approx(8**0.29)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2:1/32, 8:1/8", "a share of the training has no meaning"),
        ("2:0.5", "a share of the training has no meaning"),
        ("8:10, 2:20", "workers of a stage must rise"),
        ("2:20, 8:10", "minibatches of a stage must rise"),
        ("0:10", "workers of a stage must be a whole number, at least 1"),
        ("slowly", 'grow must be "auto"'),
        ("auto(rate=2)", "auto takes first, threshold, blocks"),
        ("auto(first=1)", "first of a growth must be"),
        ("auto(", "cannot read the growth"),
        (True, "grow must be text"),
    ],
)
def test_wrong_growths_are_refused(text: str, why: str) -> None:
    with pytest.raises(RuleError, match=why):
        rule_from_text(f"bmuf(grow={text!r})")


def test_a_rate_of_many_workers_with_and_without_growth() -> None:
    for text, factor in [
        ("bmuf(rate_exponent=0.5)", 4.0),
        ("bmuf(grow='auto', rate_exponent=0.5)", 4.0),
        ("bmuf(grow='auto')", 16**0.29),
        ("auto()", 16**0.29),
        ("bmuf()", 1.0),
        ("sync()", 1.0),
    ]:
        assert rule_from_text(text).rate_factor(16) == pytest.approx(factor), text
        assert rule_from_text(text).rate_factor(1) == 1.0
    with pytest.raises(RuleError, match="rate_exponent must be a number from 0 to 1"):
        rule_from_text("bmuf(rate_exponent=-1)")
    with pytest.raises(RuleError, match="rate_exponent must be a number from 0 to 1"):
        rule_from_text("bmuf(grow='auto', rate_exponent=2)")


def test_a_run_whose_workers_are_all_there_refuses_growth() -> None:
    model = make_net()
    with pytest.raises(UnsupportedError, match="grow= needs workers that join it later"):
        paceline.attach(model, momentum_sgd(model.parameters()), "bmuf(grow='auto')")
