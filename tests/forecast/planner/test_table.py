# SPDX-License-Identifier: Apache-2.0
"""Tables, pictures and JSON of forecasts."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from paceline.rules.recipes import rule_from_text
from paceline_plugins.forecast.planner import Forecast, forecasts, recommend
from paceline_plugins.forecast.planner.table import as_json, at, details, efficiencies

from .examples import wire, work


@pytest.fixture(scope="module")
def rows() -> list[list[Forecast]]:
    rules = [rule_from_text(text) for text in ("sync", "bmuf", "diloco", "asgd")]
    return forecasts(rules, work(), wire(), [1, 4, 8])


def text_of(table: object) -> str:
    console = Console(width=200, record=True, file=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_efficiencies_by_rule_and_number(rows: list[list[Forecast]]) -> None:
    lines = [line.split() for line in text_of(efficiencies(rows)).splitlines()]
    assert lines[0][-3:] == ["N=1", "N=4", "N=8"]
    assert lines[2] == ["bmuf()", "100.0", "91.4", "90.1"]


def test_details(rows: list[list[Forecast]]) -> None:
    assert "speed-up" in text_of(details(rows, 4))
    assert [found.rule for found in at(rows, 8)] == ["sync()", "bmuf()", "diloco()", "asgd()"]


def test_json_holds_everything(rows: list[list[Forecast]]) -> None:
    values = json.loads(json.dumps(as_json(rows, recommend(work(), wire(), 4), {"network": "made"})))
    assert len(values["forecasts"]) == 12 and values["setting"] == {"network": "made"}
    assert values["advice"]["forecast"]["workers"] == 4 and values["advice"]["why"]
