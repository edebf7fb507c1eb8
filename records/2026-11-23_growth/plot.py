# SPDX-License-Identifier: Apache-2.0
"""Draws quality.png and speed.png from plateau.json: the distance from one worker and the effective speed-up, by N."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(sys.argv[1])
NAMES = {"grown": "grown", "sync": "synchronous, the best"}
COLORS = {"grown": "C3", "sync": "C0"}

made = json.loads((RESULTS / "plateau.json").read_text(encoding="utf-8"))
counts = sorted({row["workers"] for row in made["cells"]})
plt.rcParams.update({"font.size": 13, "lines.linewidth": 2, "legend.fontsize": 11})


def best(kind: str, task: str, workers: int) -> float:
    """Over one worker, in percent; of several rates, the best."""
    rows = [row for row in made["cells"] if row["task"] == task and row["workers"] == workers]
    found = [row["over_serial"] for row in rows if row["method"].partition("-")[0] == kind]
    return 100 * min(one for one in found if one is not None)


def axes_by_workers(ylabel: str) -> tuple[plt.Figure, plt.Axes]:
    """A picture that can be read on a phone."""
    figure, axes = plt.subplots(figsize=(5.2, 4.2), layout="constrained")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="workers", ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


figure, axes = axes_by_workers("loss over one worker's, %")
for kind, name in NAMES.items():
    for task, line in zip(made["plateau"], ("-", "--", ":"), strict=False):
        label = name if line == "-" else None
        axes.plot(counts, [best(kind, task, n) for n in counts], line, color=COLORS[kind], marker="o", label=label)
for task, line in zip(made["plateau"], ("-", "--", ":"), strict=False):
    axes.plot([], [], line, color="gray", label=task)
axes.axhline(0, color="black", linewidth=1)
axes.legend(frameon=False)
figure.savefig(RESULTS / "quality.png", dpi=150)

figure, axes = axes_by_workers("effective speed-up")
axes.plot(counts, counts, color="gray", linewidth=1, label="N")
for (gbit, by_workers), color in zip(made["effective_speedup_by_gbit"].items(), ("C3", "C1", "C2"), strict=False):
    values = [by_workers[str(count)] or float("nan") for count in counts]
    name = "without exchanges" if gbit == "inf" else f"{gbit} Gbit/s"
    axes.plot(counts, values, color=color, marker="o", label=name)
axes.set_yscale("log", base=2)
axes.set_yticks(counts, [str(count) for count in counts])
axes.legend(frameon=False)
figure.savefig(RESULTS / "speed.png", dpi=150)
