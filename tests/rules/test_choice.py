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
    Choice,
    ProbeTimes,
    choose,
    has_probe,
    without_probe,
    worth_it,
)
from paceline.rules.schedule import Pace, Paced, Probe

AUTO = Paced(4, probe=Probe())
SGD = {"dense": 1.0, "bf16": 0.5, "int8": 0.25, "e3m0": 0.125}
"""Bytes of a block over those of gradients."""


def times(gradient_s: float, exposed_s: float | None = None, sizes: dict[str, float] | None = None) -> ProbeTimes:
    """Beside a second of computing."""
    return ProbeTimes(1.0, gradient_s, exposed_s, {name: size * gradient_s for name, size in (sizes or SGD).items()})


def what(gradient_s: float, exposed_s: float | None = None, schedule: Paced = AUTO, **more: Any) -> tuple[Any, ...]:
    choice = choose(times(gradient_s, exposed_s, **more), schedule)
    assert choice is not None
    return (choice.codec, choice.period, choice.overlap) if not choice.lockstep else ("lockstep",)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_synchronous_steps_stay_up_to_the_share() -> None:
    """x / (x + 1) = 0.2 at a quarter of a second."""
    fifth = Paced(4, pace=Pace(share=0.2), probe=Probe())
    assert what(0.5, 0.25, fifth) == ("lockstep",)
    assert what(0.5, 0.26, fifth) == ("dense", 4, 0)  # 0.5 / 4.5 = 11 %


@pytest.mark.parametrize(
    ("gradient_s", "expected"),
    [
        (0.08, ("dense", 4, 0)),  # 0.08 * 49 = 3.92 minibatches
        (0.082, ("dense", 4, 1)),  # 4.02: it is hidden instead
        (3.2, ("dense", 4, 4)),  # 1.25 * 3.2 = 4
        (3.3, ("bf16", 4, 3)),  # 1.25 * 1.65 = 2.06
        (6.4, ("bf16", 4, 4)),
        (6.5, ("int8", 4, 3)),  # 1.25 * 1.625 = 2.03
        (12.8, ("int8", 4, 4)),
        (25.6, ("int8", 8, 8)),
        (25.7, ("e3m0", 8, 5)),  # 1.25 * 3.21 = 4.02: 6 minibatches would do, but 8 were enough for int8
        (100.0, ("e3m0", 16, 16)),  # 15.6
        (1000.0, ("e3m0", 64, 64)),  # 156 would be needed
    ],
)
def test_the_rows_of_the_ladder(gradient_s: float, expected: tuple[str, int, int]) -> None:
    assert what(gradient_s, 1.0) == expected


def test_of_adam_only_dense_is_left() -> None:
    """Two of three numbers are moments, which no codec writes."""
    adam = {name: 2 + round(1000 * size) for name, size in {"dense": 1, "bf16": 1, "int8": 1, "e3m0": 1}.items()}
    assert worth_it(adam) == ["dense"]
    assert worth_it({"dense": 3000, "bf16": 2500, "int8": 2250, "e3m0": 2125}) == ["dense"]
    assert worth_it({name: int(1000 * size) for name, size in SGD.items()}) == [codec for codec, _ in LADDER]
    assert what(9.0, None, sizes={"dense": 3.0}) == ("dense", 48, 34)  # 1.25 * 27


# -- a faster network --------------------------------------------------------------------------------------------------


def quality(choice: Choice) -> tuple[int, int]:
    """The loss of quality: the codec's row and the period."""
    return (-1, 1) if choice.lockstep else ([codec for codec, _ in LADDER].index(choice.codec), choice.period)


@given(
    st.floats(1e-3, 10),
    st.lists(st.floats(1e-6, 1e4), min_size=2, max_size=6),
    st.floats(0, 1),
    st.sampled_from([1, 3]),
)
def test_a_faster_network_never_costs_quality(step_s: float, exchanges: list[float], shown: float, dense: int) -> None:
    """`shown` of an exchange is what no overlap hides."""
    found = []
    for gradient_s in sorted(exchanges):
        blocks = {name: (dense - 1 + size) * gradient_s for name, size in SGD.items() if dense == 1 or name == "dense"}
        choice = choose(ProbeTimes(step_s, gradient_s, max(shown * gradient_s, gradient_s - step_s), blocks), AUTO)
        assert choice is not None
        found.append(quality(choice))
    for faster, slower in pairwise(found):
        assert faster[0] <= slower[0] and faster[1] <= slower[1]


# -- the rule ----------------------------------------------------------------------------------------------------------


def test_with_and_without_a_probe() -> None:
    assert has_probe(rule_from_text("auto")) and not has_probe(rule_from_text("auto(probe=0)"))
    assert not has_probe(rule_from_text("bmuf")) and not has_probe(rule_from_text("asgd"))
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
