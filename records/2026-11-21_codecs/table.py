# SPDX-License-Identifier: Apache-2.0
"""From results.jsonl: the tables, between the marks in README.md, and plot.png beside it. `python table.py`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rows import FAMILIES, ROWS, Row

HERE = Path(__file__).resolve().parent
MINIBATCHES = 3200
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
WIDEST = 30.0  # % over dense; what is above stands at the plot's edge, with its number
Line = dict[str, Any]


def lines_of(row: Row, lines: list[Line]) -> dict[int, Line]:
    """Seed -> the training of that row."""
    wanted = {"rule": row.rule, "optimizer": row.optimizer, "lr": row.lr, "minibatches": MINIBATCHES}
    return {line["seed"]: line for line in lines if wanted.items() <= line.items()}


def over(own: dict[int, Line], dense: dict[int, Line]) -> list[float]:
    """% over dense with the same seed, for every seed that both have; inf for a training that failed."""
    seeds = sorted(own.keys() & dense.keys())
    return [100 * (own[s].get("loss", float("inf")) / dense[s]["loss"] - 1) for s in seeds]


def cells(own: dict[int, Line], dense: dict[int, Line]) -> list[str]:
    """Loss by seed, and the mean difference to dense with its range."""
    losses = " ".join(f"{own[s]['loss']:.3f}" if "loss" in own[s] else "failed" for s in sorted(own))
    points = over(own, dense)
    spread = f" ({min(points):+.1f} to {max(points):+.1f})" if len(points) > 1 else ""
    return [losses or "-", f"{mean(points):+.1f} %{spread}" if points else "-"]


def pairs(family: str) -> dict[str, tuple[Row, Row]]:
    """Codec -> its rows with and without feedback."""
    own = [row for row in ROWS if row.family == family and row.feedback is not None]
    half = len(own) // 2
    return {a.codec: (a, b) for a, b in zip(own[:half], own[half:], strict=True)}


def table(family: str, lines: list[Line]) -> str:
    """Markdown."""
    dense = lines_of(next(row for row in ROWS if row.family == family and row.feedback is None), lines)
    full = dense[0]["bytes"]
    head = ["codec", "rule with feedback", "MB sent", "of dense", "loss with feedback, by seed", "over dense"]
    head += ["without feedback", "over dense"]
    rows = [head, ["---"] * len(head)]
    losses, _ = cells(dense, dense)
    rows.append(["dense", f"`{FAMILIES[family][0]}`", f"{full / 1e6:.1f}", "1", losses, "", "", ""])
    for codec, (with_feedback, without) in pairs(family).items():
        own = lines_of(with_feedback, lines)
        sent = next((line["bytes"] for line in own.values() if "bytes" in line), None)
        size = ["-", "-"] if sent is None else [f"{sent / 1e6:.1f}", f"1/{full / sent:.1f}"]
        rows.append(
            [codec, f"`{with_feedback.rule}`", *size, *cells(own, dense), *cells(lines_of(without, lines), dense)]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def others(lines: list[Line]) -> str:
    """Markdown: the trainings that are in no other table."""
    shown = [id(line) for row in ROWS for line in lines_of(row, lines).values()]
    rows = ["| rule | optimizer, rate | minibatches | seed | loss |", "| --- | --- | --- | --- | --- |"]
    for line in lines:
        if id(line) not in shown:
            setting = f"{line['optimizer']} {line['lr']:g} | {line['minibatches']:,} | {line['seed']}"
            rows.append(f"| `{line['rule']}` | {setting} | {line.get('loss', float('nan')):.4f} |")
    return "\n".join(rows)


def panel(axes: Axes, family: str, lines: list[Line]) -> None:
    """A line for each codec: filled points with feedback, open ones without, one for each seed."""
    dense = lines_of(next(row for row in ROWS if row.family == family and row.feedback is None), lines)
    named = pairs(family)
    for place, rows in enumerate(named.values()):
        for row, colour, shift in zip(rows, ("#0072b2", "#d55e00"), (-0.13, 0.13), strict=True):
            points = over(lines_of(row, lines), dense)
            shown = [min(point, WIDEST) for point in points]
            fill = colour if row.feedback else "white"
            axes.plot(shown, [place + shift] * len(shown), "o", color=colour, markerfacecolor=fill, markersize=5)
            if points and max(points) > WIDEST:
                text = f"{max(points):.0f} %" if max(points) < 1e4 else "diverged"
                axes.text(0.9 * WIDEST, place + shift, text, ha="right", va="center", fontsize=8, color=colour)
    axes.axvspan(-1, 1, color="0.9", zorder=0)
    axes.set_xscale("symlog", linthresh=2, linscale=1)
    axes.set_xlim(-5, 1.15 * WIDEST)
    ticks = [-4, -2, -1, 0, 1, 2, 5, 10, 20, 30]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(range(len(named)), list(named))
    axes.set_ylim(len(named) - 0.5, -0.5)
    axes.grid(axis="x", color="0.93")
    axes.set_title(FAMILIES[family][0].replace("sync()", f"sync() with {FAMILIES[family][1]}"), fontsize=10, loc="left")


def plot(lines: list[Line], path: Path) -> None:
    """All families under one scale."""
    counts = [len(pairs(family)) for family in FAMILIES]
    figure = Figure(figsize=(7.5, 0.32 * sum(counts) + 3), layout="constrained")
    all_axes = figure.subplots(len(counts), 1, sharex=True, height_ratios=counts)
    for family, axes in zip(FAMILIES, all_axes, strict=True):
        panel(axes, family, lines)
    for fill, label in (("#0072b2", "with feedback"), ("white", "without")):
        colour = "#0072b2" if label == "with feedback" else "#d55e00"
        all_axes[0].plot([], [], "o", color=colour, markerfacecolor=fill, label=label)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    all_axes[-1].set_xlabel("validation loss over dense of the same seed [%]; grey: within 1 %")
    figure.savefig(path, dpi=110)


def main() -> None:
    lines = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    text = "\n\n".join(f"**{family}**\n\n{table(family, lines)}" for family in FAMILIES)
    text += f"\n\n**Other trainings**\n\n{others(lines)}"
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    plot(lines, HERE / "plot.png")
    print(text)


if __name__ == "__main__":
    main()
