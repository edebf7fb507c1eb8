# SPDX-License-Identifier: Apache-2.0
"""Print the table of curves.json, and draw plot.png: where each recipe ends, over one worker with its optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent


def rows(trainings: dict[str, Any]) -> list[tuple[str, str, float, float, float]]:
    """Name, optimizer, rate, mean held-out loss, and that over one worker's, in per cent."""
    found = []
    for name, row in trainings.items():
        alone = mean(trainings[row["optimizer"]]["held_out"])
        ours = mean(row["held_out"])
        found.append((name, row["optimizer"], row["lr"], ours, 100 * (ours / alone - 1)))
    return found


def draw(found: list[tuple[str, str, float, float, float]]) -> None:
    """Bars of the recipes, the best first."""
    ordered = sorted(found, key=lambda row: -row[4])
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    axes.barh([row[0] for row in ordered], [row[4] for row in ordered], color="#2a8fc4")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("held-out loss of 4 workers over that of one worker, %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "plot.png", dpi=110)


def main() -> None:
    """Both."""
    trainings = json.loads((HERE / "curves.json").read_text(encoding="utf-8"))["trainings"]
    found = rows(trainings)
    print("| training | optimizer, rate | held-out loss, each seed | mean | over one worker |")
    print("| --- | --- | --- | --- | --- |")
    for name, optimizer, rate, ours, over in found:
        each = " ".join(f"{loss:.3f}" for loss in trainings[name]["held_out"])
        alone = trainings[name]["rule"] is None
        label = "one worker" if alone else f"`{trainings[name]['rule'].removesuffix('()')}`"
        print(f"| {label} | {optimizer}, {rate:g} | {each} | {ours:.3f} | {'' if alone else f'{over:+.1f} %'} |")
    draw([row for row in found if trainings[row[0]]["rule"] is not None])


if __name__ == "__main__":
    main()
