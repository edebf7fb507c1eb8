# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report (needs the extra `paceline[report]`).

Each function takes one run or several to compare, and returns a matplotlib figure, or None where the logs hold nothing
to draw. One run is drawn in detail, a colour a value or a bar a worker; several are overlaid, a colour or a bar a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.observe.reports.canvas import (
    COMPUTE,
    DATA,
    EXCHANGE,
    INK,
    WAIT,
    byte_unit,
    colour,
    legend_above,
    new_figure,
    short,
    short_counts,
    style,
    time_unit,
    whole_numbers,
)
from paceline.observe.reports.curves import (
    Curve,
    Points,
    by_samples,
    by_time,
    bytes_by_time,
    counts_samples,
    data_by_time,
    delays_of_pushes,
    effective_by_time,
    losses,
    smooth,
    thin,
)
from paceline.observe.reports.log import RunLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Sequence[RunLog]
COMPUTING, EXCHANGING, WAITING_FOR_DATA = ("computing", COMPUTE), ("exchanging", EXCHANGE), ("waiting for data", DATA)
PARTS = (COMPUTING, WAITING_FOR_DATA, ("waiting for the slowest", WAIT), EXCHANGING)
PARTS_OF_PUSHING = (COMPUTING, WAITING_FOR_DATA, ("waiting", WAIT), EXCHANGING)  # also for answers
LEAST_WAIT = 1.0  # percent of waiting for data; below this at all times it is not drawn
MOST_LINES = 8  # with colours of their own
FIRST_FALL = 0.08  # of the run: its losses do not set the range of the y axis
MOST_PANELS = 3
MOST_BARS = 48  # of a histogram
RARE = 0.5  # percent of the pushes that may lie outside of the histogram


def loss_by_samples(runs: Runs) -> Figure | None:
    """Losses over the samples of all workers: does the rule learn as much from each sample?"""
    counted = all(counts_samples(run) for run in runs)
    label = f"{'samples' if counted else 'minibatches'} of all workers"
    return _loss_figure(runs, lambda run, name: by_samples(run, name, counted), label)


def loss_by_time(runs: Runs) -> Figure | None:
    """Losses over the wall clock: does the cluster get there sooner?"""
    scale, unit = time_unit(max(run.wall_s for run in runs))

    def curve_of(run: RunLog, name: str) -> Curve:
        curve = by_time(run, name)
        return Curve(name, unit, curve.x / scale, curve.y)

    return _loss_figure(runs, curve_of, f"time since attach [{unit}]")


def time_per_worker(runs: Runs) -> Figure | None:
    """Time computing, waiting for data and for workers, and exchanging: a bar a worker, or a run when comparing."""
    rows = [row for run in runs for row in (_workers(run) if len(runs) == 1 else [_mean(run)])]
    longest = max((sum(times) for _, times in rows), default=0.0)
    if not longest:
        return None
    scale, unit = time_unit(longest)
    with style():
        figure = new_figure(min(14.0, 1.5 + 0.34 * len(rows)))
        axes = figure.subplots()
        names = [name for name, _ in rows]
        left = np.zeros(len(rows))
        for part, (label, shade) in enumerate(PARTS_OF_PUSHING if any(run.delays for run in runs) else PARTS):
            width = np.array([times[part] for _, times in rows]) / scale
            if label == WAITING_FOR_DATA[0] and not any(run.logs_data_wait for run in runs):
                continue
            axes.barh(names, width, left=left, color=shade, label=label, height=0.72)
            left += width
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"time [{unit}]" if len(runs) == 1 else f"mean time of a worker [{unit}]")
        legend_above(figure, axes)
    return figure


def data_over_time(runs: Runs) -> Figure | None:
    """Share of the time in which workers wait for data: a line a worker, or a run when comparing."""
    lines = _data_waits(runs)
    if max((float(curve.y.max()) for _, curve in lines if len(curve.y)), default=0.0) < LEAST_WAIT:
        return None
    scale, unit = time_unit(max(run.wall_s for run in runs))
    with style():
        figure = new_figure(3.2)
        axes = figure.subplots()
        if len(lines) > MOST_LINES:  # all pale, and over them the longest wait
            for _, curve in lines:
                axes.plot(curve.x / scale, curve.y, color=colour(0), linewidth=1.0, alpha=0.4)
            lines = [(1, max((curve for _, curve in lines), key=lambda curve: float(curve.y.sum())))]
        for turn, curve in lines:
            x, y, shade = curve.x / scale, curve.y, colour(turn)
            axes.plot(x, y, color=shade, linewidth=1.8, marker="o", markersize=3.5, label=curve.name)
        axes.set_xlabel(f"time since attach [{unit}]")
        axes.set_ylabel("waiting for data [%]")
        axes.set_xlim(0, max(run.wall_s for run in runs) / scale)
        axes.set_ylim(bottom=0)
        if len(runs) > 1 or len(runs[0].workers) > 1:
            legend_above(figure, axes)
    return figure


def _data_waits(runs: Runs) -> list[tuple[int, Curve]]:
    """A curve a worker, or a run when comparing, with the number of its colour."""
    if len(runs) > 1:
        logged = [(turn, run) for turn, run in enumerate(runs) if run.logs_data_wait]
        return [(turn, data_by_time(run.workers, run.label, run.wall_s)) for turn, run in logged]
    workers = [worker for worker in runs[0].workers if worker.logs_data_wait]
    return [(turn, data_by_time([one], f"worker {one.rank}", runs[0].wall_s)) for turn, one in enumerate(workers)]


def bytes_over_time(runs: Runs) -> Figure | None:
    """Bytes sent so far by all workers together."""
    curves = [bytes_by_time(run) for run in runs]
    most = max(float(curve.y[-1]) for curve in curves)
    if not most:
        return None
    scale, unit = byte_unit(most)
    lines = [(turn, run.label, curve) for turn, (run, curve) in enumerate(zip(runs, curves, strict=True))]
    return _by_time_figure(runs, lines, f"sent by all workers [{unit}]", scale, legend=len(runs) > 1)


def effective_over_time(runs: Runs) -> Figure | None:
    """How many workers all are worth: 1 where they find the same, N where what they find is independent."""
    several = len(runs) > 1
    lines = [
        (turn, f"{run.label}, of {run.size}" if several else f"of {run.size}", effective_by_time(run))
        for turn, run in enumerate(runs)
    ]
    lines = [line for line in lines if len(line[2].x) > 1]
    return _by_time_figure(runs, lines, "effective workers", 1.0, legend=True) if lines else None


def _by_time_figure(
    runs: Runs, lines: Sequence[tuple[int, str, Curve]], y_label: str, scale: float, *, legend: bool
) -> Figure:
    """Curves over seconds since attach, each with the number of its colour and a label; `scale` divides their y."""
    second, time = time_unit(max(run.wall_s for run in runs))
    with style():
        figure = new_figure(3.2)
        axes = figure.subplots()
        for turn, label, curve in lines:
            pick = np.unique(np.linspace(0, len(curve.x) - 1, 500).astype(int))
            axes.plot(curve.x[pick] / second, curve.y[pick] / scale, color=colour(turn), label=label)
        axes.set_xlabel(f"time since attach [{time}]")
        axes.set_ylabel(y_label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        if legend:
            legend_above(figure, axes)
    return figure


def delay_of_pushes(runs: Runs) -> Figure | None:
    """Staleness of the pushes of all workers, and its mean; a colour a run when comparing."""
    pushed = [(turn, run, delays_of_pushes(run)) for turn, run in enumerate(runs) if run.delays]
    if not pushed:
        return None
    end = max(_end_of_bars(curve) for _, _, curve in pushed)
    width = -(-end // MOST_BARS)
    edges = np.arange(0, end + width, width, dtype=np.float64) - 0.5
    with style():
        figure = new_figure(3.2)
        axes = figure.subplots()
        for turn, run, curve in pushed:
            _draw_delays(axes, edges, curve, colour(turn), run.label if len(runs) > 1 else "")
        axes.set_xlabel("delay of a push [updates]" + (f", {width} in a bar" if width > 1 else ""))
        axes.set_ylabel("share of pushes [%]")
        whole_numbers(axes)
        axes.set_xlim(edges[0] - 0.5 * width, edges[-1] + 0.5 * width)
        axes.set_ylim(bottom=0)
        axes.grid(axis="x", visible=False)
        legend_above(figure, axes)
    return figure


def _end_of_bars(curve: Curve) -> int:
    """Delays that are drawn, counted from 0: all, unless a few are far greater than the rest."""
    usual = int(np.searchsorted(np.cumsum(curve.y), 100 - RARE - 1e-9)) + 1
    return usual if len(curve.x) > 2 * usual else len(curve.x)


def _draw_delays(axes: Axes, edges: Points, curve: Curve, shade: str, label: str) -> None:
    """One run's bars and its mean; with a label, as transparent steps over those of other runs."""
    mean = float((curve.x * curve.y).sum()) / 100
    heights = np.histogram(curve.x, edges, weights=curve.y)[0]
    if not label:
        axes.bar((edges[:-1] + edges[1:]) / 2, heights, 0.86 * np.diff(edges), color=shade)
        axes.axvline(mean, color=INK, linestyle="--", label=f"mean {mean:.2f}")
        return
    axes.stairs(heights, edges, fill=True, color=shade, alpha=0.22)
    axes.stairs(heights, edges, color=shade, linewidth=1.8)
    axes.axvline(mean, color=shade, linestyle="--", label=f"{label}: mean {mean:.2f}")


def _loss_figure(runs: Runs, curve_of: Callable[[RunLog, str], Curve], x_label: str) -> Figure | None:
    names = list(dict.fromkeys(name for run in runs for name in losses(run)))[:MOST_PANELS]
    if not names:
        return None
    with style():
        figure = new_figure(4.0)
        if len(runs) == 1:
            panels = [figure.subplots()]
            _draw_all(panels[0], [(curve_of(runs[0], name), name) for name in names])
            panels[0].set_ylabel(short(names[0]) if len(names) == 1 else "loss")
        else:
            panels = list(figure.subplots(1, len(names), squeeze=False)[0])
            for axes, name in zip(panels, names, strict=True):
                _draw_all(axes, [(curve_of(run, name), run.label) for run in runs])
                axes.set_ylabel(short(name))
        for axes in panels:
            axes.set_xlabel(x_label)
        if len(runs) > 1 or len(names) > 1:
            legend_above(figure, panels[0])
    return figure


def _draw_all(axes: Axes, curves: list[tuple[Curve, str]]) -> None:
    for turn, (curve, label) in enumerate(curves):
        _draw(axes, curve, colour(turn), label)
    axes.margins(x=0.02)
    axes.set_xlim(left=0)
    if any(curve.unit in ("samples", "minibatches") for curve, _ in curves):
        short_counts(axes)
    _range_of_y(axes, [curve for curve, _ in curves])


def _draw(axes: Axes, curve: Curve, shade: str, label: str) -> None:
    """Draw a noisy curve pale under its running mean, a short one with markers."""
    if curve.noisy:
        raw, mean = thin(curve), thin(smooth(curve))
        axes.plot(raw.x, raw.y, color=shade, alpha=0.28, linewidth=0.9)
        axes.plot(mean.x, mean.y, color=shade, label=label)
    else:
        size = 5.0 if len(curve.x) <= 30 else 3.5
        axes.plot(curve.x, curve.y, color=shade, marker="o", markersize=size, label=label)


def _range_of_y(axes: Axes, curves: list[Curve]) -> None:
    """Set the range of y without the first fall, which would flatten the rest."""
    end = max((float(curve.x[-1]) for curve in curves if len(curve.x)), default=0.0)
    late = []
    for curve in curves:
        shown = smooth(curve) if curve.noisy else curve
        chosen = shown.y[(shown.x >= FIRST_FALL * end) & np.isfinite(shown.y)]
        late.extend(chosen.tolist())
    if late and max(late) > min(late):
        margin = 0.07 * (max(late) - min(late))
        axes.set_ylim(min(late) - margin, max(late) + margin)


def _workers(run: RunLog) -> list[tuple[str, tuple[float, ...]]]:
    """Label and seconds of each worker, in the order of `PARTS`."""
    return [(f"worker {w.rank}", (w.compute_s, w.data_s, w.wait_s, w.exchange_s)) for w in run.workers]


def _mean(run: RunLog) -> tuple[str, tuple[float, ...]]:
    parts = [times for _, times in _workers(run)]
    return run.label, tuple(np.mean(np.array(parts), axis=0).tolist())
