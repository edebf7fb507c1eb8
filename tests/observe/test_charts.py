# SPDX-License-Identifier: Apache-2.0
"""What a browser is given to draw, by logs that are known exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.observe import read_run
from paceline_plugins.report.chart_page import ASSETS
from paceline_plugins.report.charts import POINTS_OF_A_CHART, Chart, charts

from .conftest import Event, waiting

Write = Callable[..., Path]


def drawn(*runs: Path) -> dict[str, Chart]:
    return {chart.key: chart for chart in charts([read_run(run) for run in runs])}


def test_a_broken_worker_spoils_neither_the_curve_nor_the_last_value(write_run: Write) -> None:
    def broken(rank: int, events: list[Event]) -> list[Event]:
        return [event | {"value": "nan"} if rank and event.get("name") == "loss" else event for event in events]

    path = write_run(change=broken)
    training, validation = drawn(path)["loss-by-time"].lines
    assert (training.name, validation.name) == ("loss (training)", "validation loss")
    assert np.isfinite(training.curve.y).all() and np.isfinite(read_run(path).last("loss") or np.nan)


def test_where_the_time_goes_is_what_the_lines_say(write_run: Write) -> None:
    lines = drawn(write_run(change=waiting))["where-time-goes"].lines
    shares = {line.name: float(line.curve.y[-1]) for line in lines}
    assert shares == pytest.approx({"waiting for workers": 15, "exchanging": 5, "waiting for data": 20})
    both = drawn(write_run("a"), write_run("b"))["where-time-goes"].lines
    assert [(line.name, float(line.curve.y[0])) for line in both] == [
        ("a", pytest.approx(20)),
        ("b", pytest.approx(20)),
    ]


def test_what_an_exchange_costs(write_run: Write) -> None:
    """Each block has one, and waits 150 ms and exchanges for 50; a line of two exchanges is two."""

    def twice(rank: int, events: list[Event]) -> list[Event]:
        return [event | {"exchanges": 2} if event["kind"] == "exchange" else event for event in events]

    one = write_run("one", 3)
    costs = {line.name: line.curve.y for line in drawn(one)["exchange-time"].lines}
    assert costs["waiting for workers"] == pytest.approx(np.full(40, 150))
    assert costs["exchanging"] == pytest.approx(np.full(40, 50))
    both = drawn(one, write_run("two", change=twice))["exchange-time"].lines
    assert [float(line.curve.y[7]) for line in both] == pytest.approx([200, 100])
    assert "exchange-time" not in drawn(write_run("none", change=lambda rank, events: events[:3]))


def often(rank: int, events: list[Event]) -> list[Event]:
    """A thousand reports more, and one of them no number."""
    values = [
        {"kind": "value", "rank": rank, "name": "loss", "at_s": 41 + k / 100, "total_minibatches": 160 + k,
         "value": "nan" if k == 500 else 1.0 + k % 7, "total_samples": 5120 + 32 * k} for k in range(1000)
    ]  # fmt: skip
    return events + values


def test_what_a_browser_gets_is_json_of_bounded_length(write_run: Write) -> None:
    runs = [write_run(f"run-{k}", change=often) for k in range(6)]
    for chart in drawn(*runs).values():
        told = chart.as_json()
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        assert sum(len(line["x"]) for line in told["lines"]) <= POINTS_OF_A_CHART
        assert all(len(line["x"]) == len(line["y"]) > 0 for line in told["lines"])
    (line, *_) = drawn(write_run("short", change=lambda rank, events: often(rank, events[:-1][:3])))[
        "loss-by-time"
    ].lines
    assert None in Chart("key", "", "", "", "", [line]).as_json()["lines"][0]["y"]  # a gap where the loss is no number


# -- colours -----------------------------------------------------------------------------------------------------------
def schemes() -> dict[str, dict[str, str]]:
    """The variables of the light and of the dark page."""
    from paceline_plugins.report.page import CSS

    found: dict[str, dict[str, str]] = {"light": {}, "dark": {}}
    for sheet in (CSS, (ASSETS / "page.css").read_text(encoding="utf-8")):
        light, dark = re.findall(r":root(?::not\(\.print\))? \{(.*?)\}", sheet, re.DOTALL)[:2]
        for name, text in (("light", light), ("dark", dark)):
            found[name] |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text))
    return found


def linear(colour: str) -> Any:
    part = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.1's contrast ratio."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


LINES = [f"c{k}" for k in range(8)]
TIMES = ["compute", "data", "waits", "exchange"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_seen(scheme: str) -> None:
    """WCAG AA: 4.5 for text, 3 for lines and bars."""
    colours = schemes()[scheme]
    for paper in ("paper", "panel"):
        assert all(contrast(colours[name], colours[paper]) >= 4.5 for name in ("ink", "pale"))
        assert all(contrast(colours[name], colours[paper]) >= 3 for name in (*LINES, *TIMES, "accent", "good"))
    assert contrast(colours["ink"], colours["warn"]) >= 4.5
