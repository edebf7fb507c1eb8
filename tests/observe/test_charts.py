# SPDX-License-Identifier: Apache-2.0
"""What a browser is given to draw, by logs that are known exactly."""

from __future__ import annotations

import itertools
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

from .conftest import BATCH, COMPUTE_S, PERIOD, Event, pushing, waiting

Write = Callable[..., Path]


def drawn(*runs: Path) -> dict[str, Chart]:
    return {chart.key: chart for chart in charts([read_run(run) for run in runs])}


def test_the_speed_up_is_the_sum_of_what_is_not_lost_to_exchanges(write_run: Write) -> None:
    chart = drawn(write_run(size=4, change=waiting))["speed-up"]
    (line,) = chart.lines
    assert line.curve.y == pytest.approx(np.full(40, 4 * COMPUTE_S))  # the wait for data is one worker's, too
    assert line.curve.x == pytest.approx((np.arange(40) + 0.5) * 40.5 / 40)
    assert "speed-up" not in drawn(write_run("alone", 1))


def test_a_worker_that_computes_all_the_time_and_one_that_never_does_are_one(write_run: Write) -> None:
    def split(rank: int, events: list[Event]) -> list[Event]:
        times = {"compute_s": 1.0 - rank, "wait_s": float(rank), "exchange_s": 0.0}
        return [event | times if event["kind"] == "exchange" else event for event in events]

    (line,) = drawn(write_run(change=split))["speed-up"].lines
    assert line.curve.y == pytest.approx(np.ones(40))


def test_throughput_adds_up_to_all_samples(write_run: Write) -> None:
    (line,) = drawn(write_run(size=3))["throughput"].lines
    width = 40.5 / 40
    assert line.curve.y[5] == pytest.approx(3 * PERIOD * BATCH)  # a block a second
    assert float(line.curve.y.sum()) * width == pytest.approx(3 * 40 * PERIOD * BATCH)
    assert drawn(write_run("uncounted", samples=False))["throughput"].y == "minibatches/s"


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


def test_a_line_a_worker(write_run: Write) -> None:
    lines = drawn(write_run(size=3, change=waiting))["data-over-time"].lines
    assert [line.colour for line in lines] == [0, 1, 2]
    assert [line.curve.y[0] for line in lines] == pytest.approx([20, 40, 20])


def test_of_many_workers_the_one_that_waits_most_stands_out(write_run: Write) -> None:
    *pale, most = drawn(write_run(size=9, change=waiting))["data-over-time"].lines
    assert len(pale) == 8 and all(line.pale and line.colour == 0 for line in pale)
    assert (most.name, most.colour, most.pale) == ("worker 1", 1, False)


def test_delays_are_bars_under_their_mean(write_run: Write) -> None:
    chart = drawn(write_run("run", 4, change=pushing))["delay-of-pushes"]
    (line,) = chart.lines
    assert chart.bars and line.name == "run: mean 1.78"
    assert [round(height * 5.52) for height in line.curve.y] == [160, 120, 94, 120, 18, 0, 40]
    assert line.curve.x == pytest.approx(range(7))


def test_each_run_that_pushes_has_its_colour(write_run: Write) -> None:
    runs = [write_run(name, 4, change=pushing) for name in ("a", "b")]
    lines = drawn(runs[0], write_run("still", 2), runs[1])["delay-of-pushes"].lines
    assert [(line.name, line.colour) for line in lines] == [("a: mean 1.78", 0), ("b: mean 1.78", 2)]


@pytest.mark.parametrize(
    ("delays", "bars"),
    [
        ({"0": 10}, 1),
        ({"0": 500, "3": 499, "4000": 1}, 4),  # one push that came far too late squeezes nobody
        ({"0": 500, "60": 400, "99": 100}, 34),  # 100 delays, 3 in a bar
    ],
    ids=["one delay", "a rare one", "many"],
)
def test_bars_stay_wide_enough(write_run: Write, delays: dict[str, int], bars: int) -> None:
    def give(rank: int, events: list[Event]) -> list[Event]:
        next(event for event in events if event["kind"] == "exchange")["delays"] = delays
        return events

    (line,) = drawn(write_run(size=1, change=give))["delay-of-pushes"].lines
    assert len(line.curve.x) == bars
    assert float(line.curve.y.sum()) == pytest.approx(100.0, abs=0.5)


def often(rank: int, events: list[Event]) -> list[Event]:
    """A thousand reports more, and one of them no number."""
    values = [
        {"kind": "value", "rank": rank, "name": "loss", "at_s": 41 + k / 100, "total_minibatches": 160 + k,
         "value": "nan" if k == 500 else 1.0 + k % 7, "total_samples": 5120 + 32 * k} for k in range(1000)
    ]  # fmt: skip
    return events + values


def test_long_noisy_losses_are_drawn_with_their_mean(write_run: Write) -> None:
    chart = drawn(write_run(change=often))["loss-by-samples"]
    raw, mean, validation = chart.lines
    assert (raw.pale, mean.pale, raw.colour, mean.colour) == (True, False, 0, 0)
    assert np.ptp(raw.curve.y[np.isfinite(raw.curve.y)]) > 2 * np.ptp(mean.curve.y[50:])
    assert validation.dots and validation.colour == 1


def test_the_first_fall_does_not_flatten_the_rest(write_run: Write) -> None:
    chart = drawn(write_run())["loss-by-time"]
    losses = next(line.curve.y for line in chart.lines if line.name == "loss")
    first, later = float(losses[0]), float(losses[10:].max())
    assert chart.high is not None and later < chart.high < first


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


def test_a_run_without_data_for_a_line_has_none(write_run: Write) -> None:
    def worth(rank: int, events: list[Event]) -> list[Event]:
        return [event | {"effective_workers": 1.5} if event["kind"] == "exchange" else event for event in events]

    lines = drawn(write_run("tells", change=worth), write_run("silent"))["effective-workers"].lines
    assert [line.name for line in lines] == ["tells, of 2"]


# -- colours -----------------------------------------------------------------------------------------------------------

SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""Linear RGB as it is seen (Machado et al. 2009, severity 1)."""


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


def lab(colour: str, sight: str) -> Any:
    """CIE L*a*b* of a colour as it is seen."""
    seen = np.clip(np.array(SIGHT[sight]) @ linear(colour), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    f = np.cbrt(np.maximum(xyz / [0.95047, 1, 1.08883], 1e-4))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("names", "least"), [(TIMES, 25), (LINES, 10)], ids=["parts of the time", "lines"])
def test_colours_can_be_told_apart_by_all_readers(scheme: str, names: list[str], least: float) -> None:
    colours = schemes()[scheme]
    for sight in SIGHT:
        for one, other in itertools.combinations(names, 2):
            apart = float(np.linalg.norm(lab(colours[one], sight) - lab(colours[other], sight)))
            assert apart >= least, (one, other, sight)
