# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from equal.json, in the folder that is named."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

FOLDER = Path(sys.argv[1])
OUTPUTS = {
    "light": ("LightRNN", "C3"),
    "learned": ("LightRNN, learned table", "C1"),
    "adaptive": ("adaptive softmax", "C0"),
    "full": ("full softmax", "C2"),
}
MARKERS = {"128": "^", "256": "o", "512": "s"}
TICKS = (2, 5, 10, 20, 50, 100), (300, 400, 600, 800, 1000, 1500, 2000, 4000, 8000, 20000)
WAYS = {"bytes": ":", "speed": "--"}

figures = json.loads((FOLDER / "equal.json").read_text(encoding="utf-8"))
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
for name, row in figures["models"].items():
    kind, *way, size = name.split("-")
    title, colour = OUTPUTS[kind]
    told = f"{title}, d = {row['dimension']}, {row['bytes'] / 1e6:.1f} MB"
    seconds, _, perplexities = zip(*row["curve"], strict=True)
    marker = MARKERS.get(size, "o")
    style = WAYS[way[0]] if way else "-"
    left.plot(seconds, perplexities, style, color=colour, marker=marker, markersize=5, label=told)
    right.plot(row["bytes"] / 1e6, row["perplexity"], marker, color=colour, markersize=7)
    place, offset = (row["bytes"] / 1e6, row["perplexity"]), (-8, -18 if kind == "light" else 8)
    right.annotate(f"d = {row['dimension']}", place, offset, textcoords="offset points", color=colour)
left.set(xlabel="seconds of one core", ylabel="perplexity on held-back files", yscale="log", title="equal time")
left.legend(frameon=False, fontsize=8)
right.set(
    xlabel="megabytes of parameters and table",
    xscale="log",
    yscale="log",
    title=f"after {figures['seconds']:g} seconds",
)
right.margins(x=0.2, y=0.12)
low, high = right.get_xlim()
right.set_xticks([tick for tick in TICKS[0] if low <= tick <= high])
right.xaxis.set_major_formatter("{x:g}")
for axes in (left, right):
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in TICKS[1] if low <= tick <= high], minor=False)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3, which="both")
figure.savefig(FOLDER / "plot.png", dpi=110)
