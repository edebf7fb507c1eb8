# SPDX-License-Identifier: Apache-2.0
"""Pictures of the speech table: error and speed-up over workers, the loss as it falls, and utterances as read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from _lines_plots import _figure, _ticks
from _speech import HOP, RATE, STACKED
from _speech_speed import NETWORKS
from _speech_training import METHODS, SERIAL, SHOWN, TUNING, held_out
from matplotlib.axes import Axes

COLOURS = {
    "serial": "#222222",
    "sync, rate as serial": "#c9a227",
    "sync, rate times N": "#8c6d1f",
    "averaging": "#7a7a7a",
    "bmuf paper gain": "#8fb4de",
    "bmuf, beta1 kept": "#4f8fd0",
    "bmuf": "#0b1f45",
    "diloco paper": "#2b6f3e",
    "asgd": "#b3261e",
}
COLUMNS = 4

Row = dict[str, Any]


def write_table(cells: Sequence[Row], rows: Sequence[Row], path: Path) -> None:
    """Errors and speed-ups of `cells` over N, and the losses of the trainings `rows` at the largest N."""
    figure = _figure(15, 5.2)
    errors, losses, speeds = figure.subplots(1, 3)
    _errors(errors, cells)
    _losses(losses, rows)
    _speeds(speeds, cells)
    handles, names = errors.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _by_method(cells: Sequence[Row]) -> dict[str, list[Row]]:
    """Cells of several workers, in the order of N."""
    several = sorted((cell for cell in cells if cell["workers"] > 1), key=lambda cell: int(cell["workers"]))
    return {name: [cell for cell in several if cell["method"] == name] for name in METHODS if name != SERIAL.name}


def _workers(axis: Axes, cells: Sequence[Row]) -> None:
    workers = sorted({cell["workers"] for cell in cells} - {1})
    axis.set(xscale="log", yscale="log", xlabel="workers")
    axis.set_xticks(workers, [str(number) for number in workers])


def _errors(axis: Axes, cells: Sequence[Row]) -> None:
    for cell in cells:
        if cell["workers"] == 1:
            axis.axhline(100 * cell["error"], color=COLOURS[SERIAL.name], label=SERIAL.name, alpha=0.7)
            axis.axhspan(100 * cell["least"], 100 * cell["most"], color=COLOURS[SERIAL.name], alpha=0.08)
    for method, mine in _by_method(cells).items():
        if mine:
            heights = [100 * cell["error"] for cell in mine]
            bars = [[100 * abs(cell["error"] - cell[end]) for cell in mine] for end in ("least", "most")]
            workers = [cell["workers"] for cell in mine]
            style = {"color": COLOURS[method], "marker": "o", "markersize": 4, "capsize": 2}
            axis.errorbar(workers, heights, yerr=bars, label=method, **style)
    _workers(axis, cells)
    axis.set(ylabel="letter error rate, %")
    _ticks(axis, (1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 70, 100))


def _losses(axis: Axes, rows: Sequence[Row]) -> None:
    largest = max(row["workers"] for row in rows)
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method and row["workers"] in (1, largest) and "curve" in row]
        if mine:
            points = [mean(values) for values in zip(*(row["curve"] for row in mine), strict=True)]
            shares = [100 * (k + 0.5) / len(points) for k in range(len(points))]
            axis.plot(shares, points, color=COLOURS[method])
    axis.set(xlabel="share of the minibatches, %", yscale="log", ylabel="nats per letter in training")
    axis.set_title(f"one and {largest} workers" if largest > 1 else "one worker", fontsize=10)
    _ticks(axis, (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10))


def _speeds(axis: Axes, cells: Sequence[Row]) -> None:
    for method, mine in _by_method(cells).items():
        for network, dash in zip(NETWORKS, ("-", ":"), strict=True):
            known = [cell for cell in mine if cell["speed_up"]]
            heights = [cell["speed_up"][network] for cell in known]
            style = {"color": COLOURS[method], "linestyle": dash, "marker": "o", "markersize": 3}
            axis.plot([cell["workers"] for cell in known], heights, **style)
    workers = sorted({cell["workers"] for cell in cells} - {1})
    axis.plot(workers, workers, color="#cccccc", zorder=0)
    _workers(axis, cells)
    axis.set(ylabel="computed speed-up over one worker")
    axis.set_title(f"{NETWORKS[0]} (lines), {NETWORKS[1]} (dots)", fontsize=10)
    _ticks(axis, (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64))


def write_features(rows: Sequence[Row], folder: Path, path: Path) -> None:
    """Held-out utterances as they are heard, with what one worker's model made of them; errors are in red."""
    readings = next(row["read"] for row in rows if row["method"] == SERIAL.name and "read" in row)
    said, heard = held_out(folder)
    figure = _figure(3.6 * COLUMNS, 2.1 * -(-SHOWN // COLUMNS))
    axes = figure.subplots(-(-SHOWN // COLUMNS), COLUMNS).flat
    for place, (axis, found) in enumerate(zip(axes, readings, strict=True)):
        truth, times = said.text(TUNING + place), int(said.times[TUNING + place])
        image = heard[TUNING + place, :times].reshape(STACKED * times, -1).T.numpy()
        axis.imshow(
            image, origin="lower", aspect="auto", cmap="magma", extent=(0, STACKED * times * HOP / RATE, 0, len(image))
        )
        axis.set_title(f"{found or '(nothing)'}", color="#2b6f3e" if found == truth else "#b3261e", fontsize=10)
        axis.set_xlabel(f"{truth}, s" if found != truth else "s", fontsize=8, color="#555555")
        axis.tick_params(labelsize=7)
        axis.set_yticks([])
    figure.savefig(path, dpi=130)
