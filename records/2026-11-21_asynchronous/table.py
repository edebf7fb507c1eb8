# SPDX-License-Identifier: Apache-2.0
"""From results.jsonl: the tables, between the marks in README.md, and plot.png beside it. `python table.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import rows
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rows import Line

from tasks import TASKS

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
COLOURS = dict(zip(rows.WAYS, ("#000000", "#999999", "#e69f00", "#56b4e9", "#0072b2"), strict=True))

DIVERGED = 50.0  # neither an error of so many % nor so large a loss has learnt anything
PROBED = ("constant", "adaptive", "fisher", "hessian")
PROBED_WAYS = ("dc_asgd constant", "dc_asgd adaptive")


class Results:
    """The trainings of the plan, and those beside it."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        plan = [want for seed in rows.SEEDS for want in rows.lines(TASKS, seed)]
        self.planned = [line for line in lines if any(want.items() <= line.items() for want in plan)]

    def of(self, task: str, way: str, workers: int, delays: str | None) -> list[Line]:
        """By seed."""
        want = {"task": task, "way": way, "workers": workers, "delays": delays}
        return sorted((line for line in self.planned if want.items() <= line.items()), key=lambda line: line["seed"])

    def numbers(self, task: str, way: str, workers: int, delays: str | None) -> list[float]:
        """What the task is measured by, by seed; infinite where a training failed."""
        return [line.get(TASKS[task].measure, float("inf")) for line in self.of(task, way, workers, delays)]

    def compared(self) -> list[Line]:
        """The trainings of the plan that the others are compared with."""
        beside = {(line["task"], line["workers"], line["delays"]): None for line in self.others()}
        return [
            line
            for place in beside
            for way in ("asgd", "dc_asgd adaptive")
            for line in self.of(place[0], way, *place[1:])
        ]

    def others(self) -> Iterator[Line]:
        """The trainings that are not of the plan."""
        kept = {id(line) for line in self.planned}
        return (line for line in self.lines if id(line) not in kept)


def shown(numbers: list[float], digits: int) -> str:
    """Mean and range."""
    if not numbers:
        return "-"
    lost = sum(number >= DIVERGED for number in numbers)
    if lost:
        rest = shown([number for number in numbers if number < DIVERGED], digits)
        return f"{lost} of {len(numbers)} diverged; the others {rest}"
    low, high, middle = (f"{value:.{digits}f}" for value in (min(numbers), max(numbers), mean(numbers)))
    return middle if len(numbers) == 1 else f"**{middle}** ({low} to {high})"


def closed(own: list[float], asgd: list[float], sequential: list[float]) -> str:
    """How much of the gap between asgd and sequential training is closed, in the means over the seeds that all have."""
    seeds = min(len(own), len(asgd), len(sequential))  # they are made in order
    if not seeds:
        return "-"
    if max(own[:seeds]) >= DIVERGED:
        return "diverged"
    here, late, best = (mean(numbers[:seeds]) for numbers in (own, asgd, sequential))
    return f"{100 * (late - here) / (late - best):.0f} %"


def table(results: Results, task: str, delays: str) -> str:
    """Markdown: a row for each way, two columns for each number of workers."""
    digits = 2 if task == "digits" else 3
    sequential = results.numbers(task, "sequential", 1, None)
    head = ["way", "rule"]
    for workers in rows.WORKERS:
        head += [f"N = {workers}", "gap closed"]
    lines = [head, ["---"] * len(head)]
    lines.append(["sequential", "", shown(sequential, digits)] + [""] * (len(head) - 3))
    for way, rules in rows.WAYS.items():
        cells = [way, f"`{rules[task]}`"]
        for workers in rows.WORKERS:
            own = results.numbers(task, way, workers, delays)
            asgd = results.numbers(task, "asgd", workers, delays)
            cells += [shown(own, digits), "" if way == "asgd" else closed(own, asgd, sequential)]
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def delay_table(results: Results) -> str:
    """Markdown: the delays that were measured, in updates."""
    lines = [["delays", *(f"N = {n}: mean, largest" for n in rows.WORKERS)]]
    lines.append(["---"] * len(lines[0]))
    for delays in rows.DELAYS:
        for way in ("asgd", "ssp(3)"):
            cells = [f"{delays}, {way}"]
            for workers in rows.WORKERS:
                own = [line for task in TASKS for line in results.of(task, way, workers, delays) if "delay_max" in line]
                means, most = [line["delay_mean"] for line in own], [line["delay_max"] for line in own]
                cells.append(f"{mean(means):.1f}, {max(most)}" if own else "-")
            lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def other_table(results: Results) -> str:
    """Markdown: trainings beside the plan, a line for each setting, and those of the plan to compare with."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in results.compared() + list(results.others()):
        key = (line["task"], line["rule"], line["workers"], line["delays"], line["lr"], line["minibatches"])
        groups.setdefault(key, []).append(line)
    lines = ["| task | rule | N | delays | rate | minibatches | mean | by seed (which) |", "| " + "--- | " * 8]
    for (task, rule, workers, delays, lr, minibatches), own in groups.items():
        cells = [task, f"`{rule}`" if rule else "sequential", str(workers), delays or "", f"{lr:g}", f"{minibatches:,}"]
        lines.append("| " + " | ".join(cells + outcomes(TASKS[task].measure, own)) + " |")
    return "\n".join(lines)


def outcomes(measure: str, lines: list[Line]) -> list[str]:
    """The mean, and each seed by itself."""
    lines = sorted(lines, key=lambda line: line["seed"])
    numbers = [line.get(measure, float("inf")) for line in lines]
    each = " ".join(f"{number:.3f}" if number < float("inf") else "failed" for number in numbers)
    middle = f"{mean(numbers):.3f}" if mean(numbers) < float("inf") else "-"
    return [middle, f"{each} ({', '.join(str(line['seed']) for line in lines)})"]


def probe_table(lines: list[Line]) -> str:
    """Markdown: medians of probe.jsonl over each half of a training."""
    head = ["task, half", "change", "moved", *(f"{kind}: cosine, strength" for kind in PROBED)]
    head += [f"error left by {way}" for way in PROBED_WAYS]
    rows_ = [head, ["---"] * len(head)]
    for task, setting in TASKS.items():
        for half, name in enumerate(("first", "second")):
            own = [line for line in lines if line["task"] == task and half == line["push"] * 2 // setting.minibatches]
            if own:
                rows_.append([f"{task}, {name}", *probe_cells(own)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows_)


def probe_cells(lines: list[Line]) -> list[str]:
    """Of one half of a training."""
    cells = [f"{median(line['change'] for line in lines):.2f}", f"{median(line['moved'] for line in lines):.3f}"]
    for kind in PROBED:
        cosine, strength = (median(line[what][kind] for line in lines) for what in ("cosine", "strength"))
        cells.append(f"**{cosine:.2f}**, {strength:.2g}")
    return cells + [f"{median(line['rules'][way]['error'] for line in lines):.2f}" for way in PROBED_WAYS]


def panel(axes: Axes, results: Results, task: str, delays: str) -> None:
    """Over the number of workers: a line of means for each way, a point for each seed."""
    sequential = results.numbers(task, "sequential", 1, None)
    if sequential:
        axes.axhspan(min(sequential), max(sequential), color="#009e73", alpha=0.3, lw=0)
        axes.axhline(mean(sequential), color="#009e73")
    for shift, way in enumerate(rows.WAYS):
        places, means = [], []
        for place, workers in enumerate(rows.WORKERS):
            own = [number for number in results.numbers(task, way, workers, delays) if number < DIVERGED]
            here = place + 0.06 * (shift - 2)
            axes.plot([here] * len(own), own, ".", color=COLOURS[way], markersize=4)
            if own:
                places.append(here)
                means.append(mean(own))
        axes.plot(places, means, "-", color=COLOURS[way], linewidth=1.3)
    axes.set_xticks(range(len(rows.WORKERS)), [f"N = {n}" for n in rows.WORKERS])
    axes.set_yscale("log")
    axes.grid(axis="y", which="both", color="0.93")
    axes.set_title(f"{task}, {delays} delays", fontsize=10, loc="left")
    axes.set_ylabel(f"{TASKS[task].measure}, {TASKS[task].unit}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(axis="y", which="both", labelsize=8)


def plot(results: Results, path: Path) -> None:
    """Both tasks, both kinds of delays."""
    figure = Figure(figsize=(8.5, 7), layout="constrained")
    grid = figure.subplots(len(TASKS), len(rows.DELAYS), sharey="row")
    for line, task in zip(grid, TASKS, strict=True):
        for axes, delays in zip(line, rows.DELAYS, strict=True):
            panel(axes, results, task, delays)
    first = grid[0][0]
    for way, colour in ({"sequential": "#009e73"} | COLOURS).items():
        first.plot([], [], color=colour, label=way)
    figure.legend(loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def read(name: str) -> list[Line]:
    """The lines of a file beside this one, if it is there."""
    path = HERE / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    results = Results(read("results.jsonl"))
    parts = []
    for task, setting in TASKS.items():
        for delays in rows.DELAYS:
            parts.append(f"**{task}, {delays} delays** ({setting.measure}, {setting.unit})")
            parts.append(table(results, task, delays))
    parts += ["**Delays that were measured**, in updates of a piece", delay_table(results)]
    if probed := read("probe.jsonl"):
        parts += ["**What a correction has to do with the change of the gradient**, medians", probe_table(probed)]
    if any(results.others()):
        parts += ["**Other trainings**", other_table(results)]
    text = "\n\n".join(parts)
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    plot(results, HERE / "plot.png")
    print(text)


if __name__ == "__main__":
    main()
