# SPDX-License-Identifier: Apache-2.0
"""Forecasts that can be solved by hand, and laws that hold for every recipe."""

from __future__ import annotations

import math

import pytest

from paceline.errors import RuleError
from paceline.rules.recipes import RECIPES, rule_from_text
from paceline.rules.traffic import bytes_per_block, overhead_bytes
from paceline_plugins.forecast.planner import Forecast, forecast, forecasts

from .examples import MIB, NOTHING, wire, work


def look(text: str, workers: int, network: object = None, **more: object) -> Forecast:
    return forecast(rule_from_text(text), work(**more), network or wire(), workers)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
def test_one_worker_has_efficiency_1(name: str) -> None:
    found = look(name, 1, spread=0.3)
    assert found.efficiency == 1 and found.step_bytes == 0 and found.wait_s == found.exchange_s == 0
    assert found.epoch_s == pytest.approx(100)


@pytest.mark.parametrize("name", RECIPES)
def test_over_no_network_at_all_every_rule_is_as_fast(name: str) -> None:
    assert look(name, 8, NOTHING).efficiency == pytest.approx(1)


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_are_the_recipes_own_formula(name: str) -> None:
    """What :mod:`tests.rules.test_laws` compares with bytes that were counted; fragments and rest are rounded."""
    rule, model = rule_from_text(name), work(moments=2)
    fragments = getattr(rule.schedule, "fragments", 1)
    formula = bytes_per_block(rule, 4, model.layout, moments=2, exchange=1 << 30)
    headers = overhead_bytes(rule, 4, model.layout) * fragments
    found = forecast(rule, model, wire(), 4)
    assert found.step_bytes * found.period == pytest.approx(formula + headers, rel=1e-3)


def test_sync_by_hand() -> None:
    """Bytes B over bandwidth W: 2 (N-1)/N B/W = 150 ms in 4 chunks of 1 MiB: 3/4 of the backward pass hide 50."""
    found = look("sync", 4)
    assert found.exchange_s == pytest.approx(0.15 - 3 / 4 * 0.1 * 2 / 3, rel=1e-3)
    assert found.efficiency == pytest.approx(0.1 / (0.1 + found.exchange_s))
    assert look("sync", 4, backward=0.0).efficiency == pytest.approx(0.1 / 0.25, rel=1e-3)
    assert found.speed_up == pytest.approx(4 * found.efficiency)


def test_blocks_by_hand() -> None:
    """16 steps of 100 ms and one exchange of 150 ms; behind the next block it costs nothing."""
    found = look("bmuf(period=16)", 4)
    assert found.efficiency == pytest.approx(1.6 / 1.75, rel=1e-3)
    assert found.step_bytes == pytest.approx((1.5 * MIB + 3 * 88) / 16)
    assert look("bmuf(period=16, overlap=16)", 4).efficiency == pytest.approx(1)
    assert look("bmuf(period=16, overlap=1)", 4).efficiency == pytest.approx(1.6 / 1.65, rel=1e-3)


def test_asynchronous_by_hand() -> None:
    """4 ways of 3/4 of the model: 150 ms there and back a minibatch of 100."""
    assert look("asgd", 4).efficiency == pytest.approx(0.1 / 0.15, rel=1e-3)
    assert look("ssp", 4).efficiency == pytest.approx(0.1 / 0.25, rel=1e-3)
    assert look("asgd(period=4)", 4).efficiency == pytest.approx(1)


def test_rules_that_are_alike_are_forecast_once_and_keep_their_names() -> None:
    texts = ("asgd", "adadelay", "bmuf", "diloco")
    rows = forecasts([rule_from_text(text) for text in texts], work(), wire(), [1, 4])
    assert [row[0].rule for row in rows] == [f"{text}()" for text in texts]
    assert rows[0][1].step_s == rows[1][1].step_s and [one.workers for one in rows[2]] == [1, 4]
    assert not rule_from_text(texts[0]).schedule.workers_meet


def test_what_makes_no_sense_is_refused() -> None:
    for workers in (0, 1 << 20, 2.5, True):
        with pytest.raises(RuleError, match="workers must be"):
            look("sync", workers)  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="make 8 workers"):
        look("sync(dimensions=(4, 2))", 6)
    for wrong in ({"backward": 2.0}, {"epoch": 0.0}, {"codec_s": -1.0}, {"pack_s": math.nan}):
        with pytest.raises(RuleError):
            work(**wrong)
