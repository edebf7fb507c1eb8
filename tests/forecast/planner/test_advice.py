# SPDX-License-Identifier: Apache-2.0
"""What is recommended, from the fastest network to the slowest."""

from __future__ import annotations

import pytest

from paceline.rules.recipes import rule_from_text
from paceline.rules.schedule.paced import least_period
from paceline_plugins.forecast.planner import Advice, recommend
from paceline_plugins.forecast.planner.advice import SHARE, exchange_share

from .examples import NOTHING, wire, work


def test_the_least_period_by_hand() -> None:
    """An exchange of one step's time is 2 % of 50."""
    assert least_period(0.1, 0.1, SHARE) == 49
    assert least_period(0.0, 0.1, SHARE) == 1
    assert least_period(0.3, 0.1, share=0.5) == 3


@pytest.mark.parametrize(
    ("model_s", "rule"),
    [
        (0.001, "sync()"),
        (0.08, "bmuf(period=59)"),
        (0.4, "bmuf(period=8, overlap=8)"),
        (10.0, "streaming_diloco("),
        (1000.0, "streaming_diloco(period=512"),
    ],
)
def test_the_slower_the_network_the_rarer_the_exchange(model_s: float, rule: str) -> None:
    advice = recommend(work(), wire(model_s), 4)
    assert advice.rule.startswith(rule) and advice.period == rule_from_text(advice.rule).schedule.period
    assert advice.forecast.rule == advice.rule and "%" in advice.why
    if model_s < 100:
        assert exchange_share(advice.forecast) <= 0.05


def test_where_waiting_is_what_costs_nobody_waits() -> None:
    advice: Advice = recommend(work(spread=1.0), NOTHING, 16)
    assert advice.rule == "asgd(period=1)" and "waiting for the slowest" in advice.why
