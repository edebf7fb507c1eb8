# SPDX-License-Identifier: Apache-2.0
"""Who copies whom, by hand and in general; what is searched; values near a winner's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import RuleError
from paceline_plugins.search.population import (
    PopulationMember,
    changes,
    copies,
    drawn_near,
    first_round,
    next_round,
    ranking,
)
from paceline_plugins.search.space import space

SPACE = space(
    [
        "lr=log(1e-4,1e-1)",
        "period=int(2,32)",
        "weight_decay=uniform(0,0.1)",
        "momentum=choice(0.99,0.5,0.9)",
        "gain=choice(auto,paper,4)",
        "betas=choice((0.9,0.99),(0.5,0.9))",
    ]
)


def members(*measures: float | None) -> list[PopulationMember]:
    """Groups that came to so much; None and nan failed."""
    return [PopulationMember({"lr": float(k + 1)}, {}).done(one) for k, one in enumerate(measures)]


def test_the_worst_quarter_copies_the_best() -> None:
    eight = members(3.0, 1.0, 8.0, 2.0, 5.0, 7.0, 4.0, 6.0)
    assert ranking(eight, False) == [1, 3, 0, 6, 4, 7, 5, 2]
    assert copies(eight, False) == {2: 1, 5: 3}
    assert copies(eight, True) == {1: 2, 3: 5}
    assert copies(members(1.0, 0.0), False) == {0: 1}
    assert copies(members(1.0, 1.0, 1.0), False) == {2: 0}


def test_a_loser_goes_on_from_the_winner_and_the_others_from_their_own() -> None:
    after = next_round(members(1.0, 0.5, 2.0), False, lambda winner: {"lr": winner["lr"] * 3})
    assert [one.source for one in after] == [0, 1, 1]
    assert [one.values["lr"] for one in after] == [1.0, 2.0, 6.0]
    assert [one.tune for one in after] == [{}, {}, {"lr_factor": 3.0}]
    assert [one.measure for one in after] == [None] * 3


def test_rates_change_by_a_factor_and_what_gives_a_third_goes_together() -> None:
    assert changes({"lr@1": 0.1, "period": 4}, {"lr@1": 0.2, "period": 8}) == {"lr_factor@1": 2.0, "period": 8}
    assert changes({"lr_factor": 2.0}, {"lr_factor": 1.0}) == {"lr_factor": 0.5}
    assert changes({"lr": 0.0}, {"lr": 0.2}) == {"lr": 0.2}
    before = {"outer_lr": 1.0, "gain": 4, "period": 4}
    assert changes(before, {**before, "gain": 2}) == {"gain": 2, "outer_lr": 1.0}
    assert changes(before, before) == {}


@given(st.lists(st.one_of(st.none(), st.floats()), min_size=2, max_size=40), st.booleans())
def test_no_loser_keeps_its_weights_and_no_winner_loses_them(measures: list[float | None], maximize: bool) -> None:
    now = members(*measures)
    taken = copies(now, maximize)
    healthy = [group for group, one in enumerate(now) if one.measure is not None]
    if not healthy:
        assert taken == {}
        return
    count, order = max(1, len(now) // 4), ranking(now, maximize)
    assert order[0] not in taken and not set(taken) & set(taken.values())
    assert set(taken.values()) <= set(order[:count]) & set(healthy)
    worst = [group for group in order[-count:] if group not in order[:count]]
    assert set(worst) | (set(range(len(now))) - set(healthy)) == set(taken)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 999))
def test_new_values_stay_in_range_and_near_the_winner(seed: int) -> None:
    winner = first_round(SPACE, 12, seed)[0].values
    found = drawn_near(SPACE, winner, random.Random(seed))
    assert found != winner and found == drawn_near(SPACE, winner, random.Random(seed))
    assert all(SPACE[name].holds(value) for name, value in found.items())
    assert 0.499 < found["lr"] / winner["lr"] < 2.001
    assert abs(found["period"] - winner["period"]) <= 3
    assert abs(found["weight_decay"] - winner["weight_decay"]) <= 0.01 + 1e-9
    ordered = [0.5, 0.9, 0.99]
    assert abs(ordered.index(found["momentum"]) - ordered.index(winner["momentum"])) <= 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr", "says no setting and values"),
        ("lr=0.1", "choice(4,8,16)"),
        ("lr=normal(0,1)", "no normal(..)"),
        ("lr=log(0,1)", "above 0"),
        ("lr=log(1,1)", "smaller one first"),
        ("lr=log(1e-4)", "two numbers"),
        ("lr=uniform(-1,1)", "at least 0"),
        ("speed=log(1,2)", "cannot be tuned"),
        ("period=log(4,16)", "whole number"),
        ("period=int(4,16.0)", "whole numbers"),
        ("period=choice(4)", "at least two"),
        ("period=choice(4,4)", "all different"),
        ("gain=choice(auto,much)", "gain must be"),
        ("momentum=uniform(0.5,1)", "below 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_does(text: str, says: str) -> None:
    with pytest.raises(RuleError) as caught:
        space([text])
    assert says in str(caught.value)
