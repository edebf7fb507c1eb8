# SPDX-License-Identifier: Apache-2.0
"""The figure of forecasts: speed-up and efficiency over the number of workers (needs the extra `paceline[report]`)."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from paceline.errors import RuleError
from paceline_plugins.forecast.planner.forecast import Forecast
from paceline_plugins.forecast.planner.table import Rows
from paceline_plugins.report.canvas import GRID, colour, legend_above, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("png", "svg")
ALIKE = 0.002
"""Rules whose efficiencies differ by less at every N share a line."""
LETTERS = 24  # of a line of the legend
DASHES = ("-", "--", ":")


def draw(rows: Rows) -> Figure:
    """Speed-up on the left, with linear speed-up as a line; efficiency on the right."""
    with style():
        lines = [(fill(label, LETTERS), row) for label, row in _lines(rows)]
        names = sum(label.count("\n") + 1 for label, _ in lines)
        figure = new_figure(4.0 + 0.1 * names)  # the legend has about three columns
        speed, share = figure.subplots(1, 2)
        counts = [found.workers for found in rows[0]]
        speed.plot(counts, counts, color=GRID, zorder=0)
        for turn, (label, row) in enumerate(lines):
            look = {"color": colour(turn), "linestyle": DASHES[turn // 8 % len(DASHES)], "marker": "o", "markersize": 3}
            speed.plot(counts, [found.speed_up for found in row], label=label, **look)
            share.plot(counts, [100 * found.efficiency for found in row], **look)
        _scale(speed, counts, "speed-up over one worker")
        speed.set_yscale("log", base=2)
        speed.yaxis.set_major_formatter("{x:g}")
        _scale(share, counts, "efficiency [%]")
        share.set_ylim(0, 105)
        legend_above(figure, speed)
        return figure


def save(rows: Rows, path: Path) -> None:
    """Write the figure as PNG or SVG, by the suffix of `path`."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise RuleError(f"a plot is written as {' or '.join(KINDS)}, got {path.name!r}; name it plan.png or plan.svg")
    figure = draw(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path, format=kind, facecolor="white", metadata={"Title": "Scaling forecast"})


def _lines(rows: Rows) -> list[tuple[str, list[Forecast]]]:
    """Label and forecasts of each line; rules that are equally fast share one."""
    found: list[tuple[list[str], list[Forecast]]] = []
    for row in rows:
        for names, other in found:
            if all(abs(a.efficiency - b.efficiency) <= ALIKE for a, b in zip(row, other, strict=True)):
                names.append(row[0].rule.removesuffix("()"))
                break
        else:
            found.append(([row[0].rule.removesuffix("()")], list(row)))
    return [(", ".join(names), row) for names, row in found]


def _scale(axes: Axes, counts: list[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts], rotation=60 if len(counts) > 6 else 0)
    axes.set_xlabel("workers")
    axes.set_ylabel(label)
