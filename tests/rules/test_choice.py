# SPDX-License-Identifier: Apache-2.0
"""What `auto` chooses from measured times, by hand; and never more loss of quality on a faster network."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import rule_from_text
from paceline.errors import RuleError
from paceline.rules.choice import (
    LADDER,
    MARGIN,
    Choice,
    Measured,
    choose,
    chosen_rule,
    most_minibatches,
    rough,
    without_probe,
    worth_it,
)
from paceline.rules.schedule import Pace, Paced, Probe

AUTO = Paced(4, probe=Probe())
SGD = {"dense": 1.0, "bf16": 0.5, "int8": 0.25, "e3m0": 0.125}
"""Bytes of a block over those of gradients."""


def what(ratio: float, schedule: Paced = AUTO, sizes: Any = SGD, chunks: int = 1, of_pass: int | None = None) -> Any:
    """(codec, period, overlap) where 1.25 times an exchange takes `ratio` times as long as computing."""
    choice = choose(Measured(MARGIN, ratio, of_pass), schedule, sizes, chunks)
    return (choice.codec, choice.period, choice.overlap) if not choice.lockstep else ("lockstep",)


# -- by hand -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.002, ("lockstep",)),  # 1/128 at most
        (0.02, ("dense", 4, 0)),  # 1/32 at most: 0.8 % of four minibatches
        (0.1, ("dense", 4, 2)),
        (2.0, ("dense", 4, 2)),
        (2.1, ("bf16", 4, 4)),  # 8 at most, of which bf16 makes 4
        (8.0, ("bf16", 4, 4)),
        (32.0, ("bf16", 16, 16)),
        (128.0, ("e3m0", 16, 16)),  # bf16 would need 64, int8 32
        (1000.0, ("e3m0", 64, 64)),  # 256 would be needed
    ],
)
def test_the_codecs_in_their_order(ratio: float, expected: tuple[Any, ...]) -> None:
    assert what(ratio) == expected


@given(st.integers(-4, 4), st.floats(0.51, 1.99), st.sampled_from([1, 8]))
def test_a_factor_of_two_either_way_changes_nothing(power: int, noise: float, chunks: int) -> None:
    """From the middle of a rough step."""
    assert what(4.0**power * noise, chunks=chunks) == what(4.0**power, chunks=chunks)
    assert rough(4.0**power * noise) == 2 * 4.0**power


def test_synchronous_steps_stay_where_the_backward_pass_hides_exchanges() -> None:
    """Eight chunks leave an eighth of 1/8 of a minibatch, 1.5 %; one leaves all of it."""
    assert what(0.1, chunks=8) == ("lockstep",) and what(0.1, chunks=1) != ("lockstep",)
    assert what(0.1, Paced(4, pace=Pace(share=0.2), probe=Probe())) == ("lockstep",)


def test_of_adam_and_of_small_models_only_dense_is_left() -> None:
    """Two of three numbers are moments, which no codec writes; a small exchange takes its time whatever it sends."""
    assert worth_it({"dense": 3 << 20, "bf16": 5 << 19, "int8": 9 << 18, "e3m0": 17 << 17}) == ["dense"]
    assert worth_it({name: int(size * 4e6) for name, size in SGD.items()}) == list(LADDER)
    assert worth_it({name: int(size * 1e6) for name, size in SGD.items()}) == ["dense"]
    assert what(1.0, sizes={"dense": 3.0}) == ("dense", 6, 6)
    assert what(9.0, sizes={"dense": 3.0}) == ("dense", 64, 64)


def test_a_given_overlap_stays() -> None:
    """Of 2 minibatches 1 is left: 49 would be needed, for which 64 is the nearest power of four times 4."""
    given_one = Paced(4, overlap=1, probe=Probe(overlap=False, codec=False))
    assert what(2.0 * MARGIN, given_one, {"": 1.0}) == ("", 64, 1)


@pytest.mark.parametrize(
    ("of_pass", "ratio", "expected"),
    [
        (1000, 1.0, ("dense", 4, 2)),
        (300, 1.0, ("dense", 3, 2)),
        (10, 1.0, ("dense", 1, 1)),
        (150, 5.0, ("bf16", 4, 4)),  # shorter blocks would wait
        (20, 5.0, ("bf16", 2, 2)),
    ],
)
def test_a_short_pass_shortens_blocks(of_pass: int, ratio: float, expected: tuple[Any, ...]) -> None:
    assert what(ratio, of_pass=of_pass) == expected
    assert most_minibatches(of_pass, 0) == max(1, of_pass // 100) and most_minibatches(None, 2) > 1000


def test_the_rule_can_be_asked_for_by_its_text() -> None:
    asked = rule_from_text("auto(gain=2, share=0.1, codec='int8', beta1=None)")
    for kind, more in (("bmuf", ""), ("bmuf_adam", ", beta1=None")):
        rule = chosen_rule(asked, Choice(False, "", 8, 2, ""), 11, kind)
        text = f"{kind}(period=8, codec='int8', overlap=2, warmup=11, rate_exponent=0.29, gain=2{more}, even=False)"
        assert rule.text() == text
        again = rule_from_text(text)
        assert (again.codec, again.outer, again.settings) == (rule.codec, rule.outer, rule.settings)
    assert chosen_rule(asked, Choice(True, "", 1, 0, ""), 11, "bmuf").text() == "sync()"


# -- a faster network --------------------------------------------------------------------------------------------------
@given(st.floats(1e-3, 10), st.lists(st.floats(1e-6, 1e4), min_size=2, max_size=6), st.sampled_from([1, 3]))
def test_a_faster_network_never_costs_quality(step_s: float, exchanges: list[float], dense: int) -> None:
    found = []
    for gradient_s in sorted(exchanges):
        sizes = {name: dense - 1 + size for name, size in SGD.items() if dense == 1 or name == "dense"}
        choice = choose(Measured(step_s, gradient_s), AUTO, sizes, 8)
        found.append((-1, 1) if choice.lockstep else (LADDER.index(choice.codec), choice.period))
    for faster, slower in pairwise(found):
        assert faster[0] <= slower[0] and faster[1] <= slower[1]


# -- the rule ----------------------------------------------------------------------------------------------------------
def test_with_and_without_a_probe() -> None:
    assert rule_from_text("auto").schedule.probe is not None
    assert all(rule_from_text(text).schedule.probe is None for text in ("auto(probe=0)", "bmuf", "asgd"))
    plain = without_probe(rule_from_text("auto"))
    assert plain.schedule == rule_from_text("auto(probe=0)").schedule and plain.text() == "auto()"
    assert repr(Paced(4, probe=Probe())) == repr(Paced(4)), "texts of rules in older checkpoints have no probe"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto(probe=3)", "probe must be 0 .* at least 4, got 3"),
        ("auto(probe=True)", "probe must be 0"),
        ("auto(probe=False)", "probe must be 0"),
        ("auto(reproducible='no')", "reproducible must be True or False, got 'no'"),
        ("auto(chunks=True)", "chunks must be a whole number from 1 to 64, got True"),
        ("bmuf(nesterov=1)", "nesterov must be True or False, got 1"),
        ("one_bit(feedback='no')", "feedback must be True or False, got 'no'"),
        ("momentum_tuned(keep_gain=0)", "keep_gain must be True or False, got 0"),
        ("auto(sync_rate=2)", "sync_rate must be a number from 0 to 1"),
    ],
)
def test_settings_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        rule_from_text(text)
