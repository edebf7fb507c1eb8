# SPDX-License-Identifier: Apache-2.0
"""The period that follows measured times, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import RuleError
from paceline.rules import describe
from paceline.rules.recipes import rule_from_text
from paceline.rules.schedule import EveryBlock, Pace, Paced
from paceline.rules.schedule.paced import least_period, simple


def test_simple_numbers() -> None:
    want = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 6, 7: 8, 8: 8, 9: 12, 12: 12, 13: 16, 17: 24, 25: 32, 33: 48, 49: 64}
    assert {n: simple(n) for n in want} == want
    assert all(n <= simple(n) < 1.5 * n + 1 for n in range(1, 2000))


@pytest.mark.parametrize(
    ("exchange_s", "minibatch_s", "period"),
    [
        (0.004, 0.01, 16),  # 0.4 * 49 = 19.6
        (0.031, 0.0098, 256),  # 155
        (0.001, 0.0049, 16),  # 10 exactly
        (0.0016, 0.01, 4),  # 7.8
        (0.0001, 0.1, 4),  # 0.049: the least period
        (0.0, 0.1, 4),
        (0.0, 0.0, 4),
        (0.1, 0.0, 512),  # nothing hides an exchange
        (9.0, 0.1, 512),  # the longest, whatever it costs
    ],
)
def test_the_rough_period_that_is_nearest(exchange_s: float, minibatch_s: float, period: int) -> None:
    schedule = Paced(pace=Pace(share=0.02, least=4, longest=512))
    assert schedule.period_for(exchange_s, minibatch_s) == period
    if 4 < period < 512:
        assert period / 2 <= least_period(exchange_s, minibatch_s, 0.02) <= 2 * period


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"share": 0.0}, "share must be a number above 0 and below 1, such as 0.02, got 0.0"),
        ({"share": 1}, "share must be"),
        ({"share": "2 %"}, "share must be"),
        ({"first": 0}, "first must be .* at least 1, got 0"),
        ({"longest": 0}, "longest must be a whole number of minibatches, at least 1, got 0"),
        ({"longest": 2.5}, "longest must be"),
        ({"longest": 3}, r"longest must be at least the shortest period \(4\), got 3"),
        ({"overlap": 5}, r"overlap must be .* to the period \(4\), got 5"),
        ({"period": 8}, "auto has no setting 'period'"),
    ],
)
def test_bad_numbers(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(RuleError, match=said):
        rule_from_text(f"auto({', '.join(f'{name}={value!r}' for name, value in wrong.items())})")


def test_bounds_by_hand_make_sense() -> None:
    with pytest.raises(RuleError, match=r"shortest period must be at least fragments \(6\), got 4"):
        Paced(8, fragments=6)
    with pytest.raises(RuleError, match="least must be a whole number"):
        Paced(8, pace=Pace(least=True))
    assert isinstance(Paced(), EveryBlock)


def test_in_words() -> None:
    assert Paced(4).describe(8) == (
        "every 4 minibatches; from measured times as few as keep exchanges at 2 % of the time, 4 to 64"
    )
    numbers = describe.numbers(rule_from_text("auto(share=0.05, first=2)"), 16)
    assert {name: numbers[name] for name in ("period", "share", "longest", "gain", "local_state")} == {
        "period": 2,
        "share": 0.05,
        "longest": 64,
        "gain": pytest.approx(16**0.7),
        "local_state": "fitting",
    }
