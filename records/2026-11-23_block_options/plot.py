# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png in the folder of settings.json: held-out loss over that of the recipe, by the decay of the average."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

FOLDER = Path(sys.argv[1])
cells = json.loads((FOLDER / "settings.json").read_text(encoding="utf-8"))["cells"]
figure, axes = plt.subplots(figsize=(6.5, 3.5), layout="constrained")
for k, (task, rate) in enumerate(dict.fromkeys((one["task"], one["rate"]) for one in cells)):
    rows = [one for one in cells if (one["task"], one["rate"]) == (task, rate) and "restart" not in one["setting"]]
    points = sorted((float(one["setting"].partition("=")[2] or 0), 100 * one["over_recipe"]) for one in rows)
    look = {"color": f"C{k // 2}", "linestyle": "--" if rate == "falling" else "-", "label": f"{task}, {rate} rate"}
    axes.plot(*zip(*points, strict=True), marker="o", **look)
axes.axhline(0, color="black", linewidth=0.5)
axes.set(xlabel="ema: decay b of the average, a block", ylabel="held-out loss over ema=0, %")
axes.legend(frameon=False)
figure.savefig(FOLDER / "plot.png", dpi=100)
