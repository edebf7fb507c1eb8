# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from forecast.json: the held-out loss over that of 4 workers, forecast and measured."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
cells = json.loads((HERE / "forecast.json").read_text(encoding="utf-8"))["cells"]
tasks = list(dict.fromkeys(cell["task"] for cell in cells))
figure, panels = plt.subplots(1, len(tasks), figsize=(8.0, 2.8), layout="constrained")
for axes, task in zip(panels, tasks, strict=True):
    for key, style in (("measured", "o-"), ("forecast", "x--")):
        mine = [cell for cell in cells if cell["task"] == task]
        counts = sorted({cell["workers"] for cell in mine})
        for number, seed in enumerate(sorted({cell["seed"] for cell in mine})):
            rows = {cell["workers"]: cell[key] / cell["first_loss"] for cell in mine if cell["seed"] == seed}
            label = key if not number else None
            line = [1.0, *(rows[count] for count in counts)]
            color = "C0" if key == "measured" else "C1"
            axes.plot([4, *counts], line, style, color=color, label=label, linewidth=1, markersize=5)
    axes.set(title=task, xscale="log", xlabel="workers", xticks=[4, *counts], xticklabels=[4, *counts])
    axes.minorticks_off()
panels[0].set_ylabel("held-out loss over that of 4 workers")
panels[0].legend(frameon=False)
figure.savefig(HERE / "plot.png", dpi=100)
