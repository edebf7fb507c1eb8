# SPDX-License-Identifier: Apache-2.0
"""Pictures of the BMUF-Adam table: error rate over workers, the loss as it falls, and lines with their reading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from _lines import to_text
from _lines_training import SERIAL, SHOWN, TUNING_LINES, held_out
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLUMNS = 3
COLOURS = {"serial": "#222222", "sync": "#8c6d1f", "moments": "#b3261e", "compensated": "#3b6fb5"}
SMALL_BETA = "#2b6f3e"
STYLES = {"rate as serial": ":", "times N": "--", "gain auto": "--"}

Row = dict[str, Any]


def _style(method: str) -> dict[str, Any]:
    colour = COLOURS[method.split(",")[0].split()[0]]
    dashes = [dash for words, dash in STYLES.items() if method.endswith(words)]
    if "beta1" in method:
        colour = SMALL_BETA
    return {"color": colour, "linestyle": dashes[0] if dashes else "-"}


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_table(cells: Sequence[Row], rows: Sequence[Row], path: Path) -> None:
    """Error rates of `cells` over N, and the losses of the trainings `rows` at the largest N."""
    figure = _figure(12, 5)
    errors, losses = figure.subplots(1, 2)
    _errors(errors, cells)
    _losses(losses, rows)
    handles, names = errors.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _errors(axis: Axes, cells: Sequence[Row]) -> None:
    for method in dict.fromkeys(cell["method"] for cell in cells):
        mine = sorted((cell for cell in cells if cell["method"] == method), key=lambda cell: int(cell["workers"]))
        style = _style(method)
        if mine[0]["workers"] == 1:
            axis.axhline(100 * mine[0]["error"], label=method, alpha=0.7, **style)
            continue
        heights = [100 * cell["error"] for cell in mine]
        bars = [[100 * abs(cell["error"] - cell[end]) for cell in mine] for end in ("least", "most")]
        workers = [cell["workers"] for cell in mine]
        axis.errorbar(workers, heights, yerr=bars, marker="o", markersize=4, capsize=2, label=method, **style)
    workers = sorted({cell["workers"] for cell in cells} - {1})
    axis.set(xscale="log", yscale="log", xlabel="workers", ylabel="character error rate, %")
    axis.set_xticks(workers, [str(number) for number in workers])
    _ticks(axis, (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100))


def _ticks(axis: Axes, values: Sequence[float]) -> None:
    """Plain numbers on a logarithmic axis."""
    least, most = axis.get_ylim()
    mine = [value for value in values if least <= value <= most]
    axis.minorticks_off()
    axis.set_yticks(mine, [f"{value:g}" for value in mine])
    axis.grid(alpha=0.3)


def _losses(axis: Axes, rows: Sequence[Row]) -> None:
    largest = max(row["workers"] for row in rows)
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method and row["workers"] in (1, largest) and "curve" in row]
        if not mine:
            continue
        points = [mean(values) for values in zip(*(row["curve"] for row in mine), strict=True)]
        axis.plot([100 * (k + 0.5) / len(points) for k in range(len(points))], points, **_style(method))
    axis.set(xlabel="share of the minibatches, %", yscale="log", ylabel="nats per character in training")
    axis.set_title(f"one and {largest} workers" if largest > 1 else "one worker", fontsize=10)
    _ticks(axis, (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10))


def write_lines(rows: Sequence[Row], folder: Path, path: Path) -> None:
    """Held-out lines, dirty as they are read, with what one worker's model made of them; errors are in red."""
    readings = next(row["read"] for row in rows if row["method"] == SERIAL.name and "read" in row)
    lines, pictures = held_out(folder)
    figure = _figure(4.0 * COLUMNS, 0.5 * -(-SHOWN // COLUMNS))
    axes = figure.subplots(-(-SHOWN // COLUMNS), 2 * COLUMNS).flat
    for axis in axes:
        axis.set_axis_off()
    for place, found in enumerate(readings):
        number = TUNING_LINES + place
        truth = to_text(lines.numbers[number, : lines.lengths[number]].tolist())
        image, words = axes[2 * place], axes[2 * place + 1]
        image.imshow(pictures[number].numpy(), cmap="gray_r", vmin=-0.4, vmax=2.0)
        words.text(0, 0.5, found, color="#2b6f3e" if found == truth else "#b3261e", family="monospace", va="center")
        if found != truth:
            words.text(0, -0.05, truth, color="#767676", family="monospace", va="center", fontsize=8)
    figure.savefig(path, dpi=130)
