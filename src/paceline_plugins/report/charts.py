# SPDX-License-Identifier: Apache-2.0
"""The charts of a run's page, as data that a browser draws.

Each function takes one run or several to compare. One run is drawn in detail, a colour a value or a worker; of several
each has its colour. A chart without data is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.observe.reports.log import RunLog
from paceline_plugins.report.canvas import byte_unit, short, time_unit
from paceline_plugins.report.curves import (
    Curve,
    Points,
    by_samples,
    by_time,
    bytes_by_time,
    counts_samples,
    data_by_time,
    delays_of_pushes,
    effective_by_time,
    exchange_s_by_time,
    shares_by_time,
    smooth,
    thin,
    throughput_by_time,
)
from paceline_plugins.report.totals import losses, with_role

Runs = Sequence[RunLog]

WAIT, EXCHANGE = "waiting for workers", "exchanging"
LEAST_WAIT = 1.0  # percent of waiting for data; below this at all times it is not drawn
MOST_LINES = 8  # with colours of their own
FIRST_FALL = 0.08  # of the run: its losses do not set the range of the y axis
MOST_LOSSES = 3
MOST_BARS = 48  # of a histogram
RARE = 0.5  # percent of the pushes that may lie outside of the histogram
MOST_POINTS = 400  # of a line; fewer where a chart has many
FEWEST_POINTS = 60
POINTS_OF_A_CHART = 3200
DIGITS = 6


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    curve: Curve
    colour: int  # its number; lines of one colour belong together
    pale: bool = False  # what was reported, under its running mean
    dots: bool = False  # few points, each with a mark


@dataclass(frozen=True)
class Chart:
    """One chart."""

    key: str  # its name in addresses and files
    title: str  # above it
    caption: str  # what it shows, in a sentence
    x: str  # label of the x axis, with its unit
    y: str  # label of the y axis, with its unit
    lines: Sequence[Line]  # of it
    low: float | None = 0.0  # lower end of the y axis; None is by the data
    high: float | None = None  # upper end of the y axis; None is by the data
    bars: bool = False  # whether each point is a bar

    def as_json(self) -> dict[str, Any]:
        """For the browser; a number that is not finite is null."""
        most = max(FEWEST_POINTS, min(MOST_POINTS, POINTS_OF_A_CHART // max(1, len(self.lines))))
        lines = [(line, line.curve if self.bars else thin(line.curve, most)) for line in self.lines]
        return {
            "key": self.key,
            "title": self.title,
            "x": self.x,
            "y": self.y,
            "low": self.low,
            "high": self.high,
            "bars": self.bars,
            "lines": [
                {"name": line.name, "colour": line.colour, "pale": line.pale, "dots": line.dots}
                | {"x": _numbers(curve.x), "y": _numbers(curve.y)}
                for line, curve in lines
            ],
        }


def charts(runs: Runs) -> list[Chart]:
    """Every chart for which the logs have data, in the order of the page."""
    drawn = [chart for draw in DRAWN for chart in draw(runs)]
    drawn = [replace(chart, lines=[line for line in chart.lines if len(line.curve.x)]) for chart in drawn]
    return [chart for chart in drawn if chart.lines]


def loss_by_samples(runs: Runs) -> Iterator[Chart]:
    """Losses over the samples of all workers: does the rule learn as much from each sample?"""
    counted = all(counts_samples(run) for run in runs)
    yield from _losses(
        runs,
        "loss-by-samples",
        "Loss by samples",
        "Pale: as reported. Bold: running mean.",
        f"{'samples' if counted else 'minibatches'} of all workers",
        lambda run, name: by_samples(run, name, counted),
    )


def loss_by_time(runs: Runs) -> Iterator[Chart]:
    """Losses over the wall clock: does the cluster get there sooner?"""
    scale, label = _time(runs)
    yield from _losses(
        runs,
        "loss-by-time",
        "Loss by time",
        "Does the run reach a loss sooner? Times are those of this machine.",
        label,
        lambda run, name: _over(by_time(run, name), scale),
    )


def _losses(
    runs: Runs, key: str, title: str, caption: str, x: str, curve_of: Callable[[RunLog, str], Curve]
) -> Iterator[Chart]:
    """Of one run a chart with all losses; of several a chart a loss."""
    names = list(dict.fromkeys(name for run in runs for name in losses(run)))[:MOST_LOSSES]
    if len(runs) == 1:
        curves = [(with_role(name), curve_of(runs[0], name)) for name in names]
        sheets = [("loss" if len(names) > 1 else "".join(with_role(name) for name in names), curves)]
    else:
        sheets = [(with_role(name), [(run.label, curve_of(run, name)) for run in runs]) for name in names]
    for number, (y, curves) in enumerate(sheets):
        low, high = _range_of_y([curve for _, curve in curves])
        lines = [line for turn, (name, curve) in enumerate(curves) for line in _with_mean(name, curve, turn)]
        more = f": {short(y)}" if len(sheets) > 1 else ""
        ending = f"-{number + 1}" if number else ""
        yield Chart(key + ending, title + more, caption, x, short(y), lines, low, high)


def _with_mean(name: str, curve: Curve, turn: int) -> list[Line]:
    """A noisy curve pale and its running mean; a short one with marks."""
    if not curve.noisy:
        return [Line(name, curve, turn, dots=True)]
    return [Line(name, curve, turn, pale=True), Line(name, smooth(curve), turn)]


def _range_of_y(curves: list[Curve]) -> tuple[float | None, float | None]:
    """The range of y without the first fall, which would flatten the rest."""
    end = max((float(curve.x[-1]) for curve in curves if len(curve.x)), default=0.0)
    late: list[float] = []
    for curve in curves:
        shown = smooth(curve) if curve.noisy else curve
        late += shown.y[(shown.x >= FIRST_FALL * end) & np.isfinite(shown.y)].tolist()
    if not late or max(late) <= min(late):
        return None, None
    margin = 0.07 * (max(late) - min(late))
    return min(late) - margin, max(late) + margin


def throughput(runs: Runs) -> Iterator[Chart]:
    """Samples a second, or minibatches where samples are not counted, of all workers together."""
    counted = all(counts_samples(run) for run in runs)
    unit = "samples" if counted else "minibatches"
    yield _by_time(
        runs,
        "throughput",
        "Throughput",
        f"The {unit} of all workers in a second.",
        f"{unit}/s",
        lambda run: throughput_by_time(run, counted),
    )


def where_time_goes(runs: Runs) -> Iterator[Chart]:
    """Shares of the time of all workers that are not computing; when comparing, their sum."""
    scale, label = _time(runs)
    if len(runs) == 1:
        names = {"wait": WAIT, "exchange": EXCHANGE, "data": "waiting for data"}
        shares = shares_by_time(runs[0].workers, runs[0].wall_s)
        shown = [name for name in names if name != "data" or runs[0].logs_data_wait]
        lines = [
            Line(names[name], _over(Curve(name, "seconds", shares.at_s, 100 * shares.part[name]), scale), turn)
            for turn, name in enumerate(shown)
        ]
    else:
        lines = [Line(run.label, _over(_not_computing(run), scale), turn) for turn, run in enumerate(runs)]
    caption = "Share of the time in which the workers do not compute. Exchanges that overlap computing are not in it."
    yield Chart("where-time-goes", "Time not computing", caption, label, "% of the time", lines)


def _not_computing(run: RunLog) -> Curve:
    shares = shares_by_time(run.workers, run.wall_s)
    return Curve(run.label, "seconds", shares.at_s, 100 * (1 - shares.part["compute"]))


def exchange_time(runs: Runs) -> Iterator[Chart]:
    """What one exchange costs a worker; when comparing, waiting and exchanging together."""
    scale, label = _time(runs)
    if len(runs) == 1:
        told = [(name, exchange_s_by_time(runs[0], part)) for part, name in (("wait", WAIT), ("exchange", EXCHANGE))]
    else:
        told = [(run.label, exchange_s_by_time(run, "wait", "exchange")) for run in runs]
    lines = [
        Line(name, Curve(name, "seconds", curve.x / scale, 1e3 * curve.y), turn)
        for turn, (name, curve) in enumerate(told)
    ]
    if any(line.curve.y.any() for line in lines):
        caption = "How long one exchange keeps a worker from computing, on average."
        yield Chart("exchange-time", "Time of an exchange", caption, label, "ms", lines)


def data_over_time(runs: Runs) -> Iterator[Chart]:
    """Share of the time in which workers wait for data: a line a worker, or a run when comparing."""
    if len(runs) > 1:
        waits = [
            (turn, data_by_time(run.workers, run.label, run.wall_s))
            for turn, run in enumerate(runs)
            if run.logs_data_wait
        ]
    else:
        workers = [worker for worker in runs[0].workers if worker.logs_data_wait]
        waits = [(k, data_by_time([one], f"worker {one.rank}", runs[0].wall_s)) for k, one in enumerate(workers)]
    if max((float(curve.y.max()) for _, curve in waits if len(curve.y)), default=0.0) < LEAST_WAIT:
        return
    scale, label = _time(runs)
    lines = [Line(curve.name, _over(curve, scale), turn) for turn, curve in waits]
    if len(lines) > MOST_LINES:  # all pale, and over them the longest wait
        most = max(lines, key=lambda line: float(line.curve.y.sum()))
        lines = [Line("other workers", line.curve, 0, pale=True) for line in lines if line is not most]
        lines.append(Line(most.name, most.curve, 1))
    yield Chart(
        "data-over-time",
        "Waiting for data",
        "Share of the time in which a worker had no batch. Waiting at the start only means that a cache fills; "
        "waiting that goes on means that the source or the loader is too slow.",
        label,
        "% of the time",
        lines,
    )


def effective_over_time(runs: Runs) -> Iterator[Chart]:
    """How many workers all are worth: 1 where they find the same, N where what they find is independent."""
    if any(len(effective_by_time(run).x) > 1 for run in runs):
        yield _by_time(
            runs,
            "effective-workers",
            "Effective workers",
            "How many workers they are worth: 1 where all find the same in a block, N where what they find is "
            "independent. More workers pay where this is near their number.",
            "effective workers",
            effective_by_time,
            lambda run: f"{run.label}, of {run.size}" if len(runs) > 1 else f"of {run.size}",
        )


def bytes_over_time(runs: Runs) -> Iterator[Chart]:
    """Bytes sent so far by all workers together."""
    curves = {id(run): bytes_by_time(run) for run in runs}
    most = max(float(curve.y[-1]) for curve in curves.values())
    if most:
        size, unit = byte_unit(most)
        yield _by_time(
            runs,
            "bytes-over-time",
            "Bytes sent",
            "By all workers together.",
            unit,
            lambda run: Curve("bytes", "seconds", curves[id(run)].x, curves[id(run)].y / size),
        )


def delay_of_pushes(runs: Runs) -> Iterator[Chart]:
    """Staleness of the pushes of all workers; a colour a run when comparing."""
    pushed = [(turn, run.label, delays_of_pushes(run)) for turn, run in enumerate(runs) if run.delays]
    if not pushed:
        return
    end = max(_end_of_bars(curve) for _, _, curve in pushed)
    width = -(-end // MOST_BARS)
    edges = np.arange(0, end + width, width, dtype=np.float64) - 0.5
    yield Chart(
        "delay-of-pushes",
        "Delay of pushes",
        "The delay of a push is the number of updates between the version of the parameters at which it was computed "
        "and the version to which it was applied; 0 is as with one worker. "
        f"Up to {RARE} % of the pushes, with far greater delays, may lie to the right of the chart.",
        "delay of a push [updates]" + (f", {width} in a bar" if width > 1 else ""),
        "% of the pushes",
        [Line(f"{label}: mean {_mean(curve):.2f}", _bars(curve, edges), turn) for turn, label, curve in pushed],
        bars=True,
    )


def _bars(curve: Curve, edges: Points) -> Curve:
    heights = np.histogram(curve.x, edges, weights=curve.y)[0]
    return Curve(curve.name, curve.unit, (edges[:-1] + edges[1:]) / 2, heights)


def _mean(curve: Curve) -> float:
    return float((curve.x * curve.y).sum()) / 100


def _end_of_bars(curve: Curve) -> int:
    """Delays that are drawn, counted from 0: all, unless a few are far greater than the rest."""
    usual = int(np.searchsorted(np.cumsum(curve.y), 100 - RARE - 1e-9)) + 1
    return usual if len(curve.x) > 2 * usual else len(curve.x)


def _by_time(
    runs: Runs,
    key: str,
    title: str,
    caption: str,
    y: str,
    curve_of: Callable[[RunLog], Curve],
    name_of: Callable[[RunLog], str] = lambda run: run.label,
) -> Chart:
    """A line a run."""
    scale, label = _time(runs)
    lines = [Line(name_of(run), _over(curve_of(run), scale), turn) for turn, run in enumerate(runs)]
    return Chart(key, title, caption, label, y, lines)


def _time(runs: Runs) -> tuple[float, str]:
    """Seconds of the unit of the x axis, and its label."""
    scale, unit = time_unit(max(run.wall_s for run in runs))
    return scale, f"time since attach [{unit}]"


def _over(curve: Curve, scale: float) -> Curve:
    """The curve with x in another unit."""
    return Curve(curve.name, curve.unit, curve.x / scale, curve.y)


def _numbers(points: Points) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in points.tolist()]


DRAWN: tuple[Callable[[Runs], Iterator[Chart]], ...] = (
    loss_by_samples,
    throughput,
    loss_by_time,
    where_time_goes,
    exchange_time,
    data_over_time,
    effective_over_time,
    bytes_over_time,
    delay_of_pushes,
)
