# SPDX-License-Identifier: Apache-2.0
"""Draws data.png: how far methods are from one worker by the number of blocks that there are."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SHOWN = {
    "bmuf": ("bmuf", "C3"),
    "diloco_paper": ("DiLoCo, published constants", "C5"),
    "sync_best": ("sync, best of its rates", "C0"),
}
figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
found = [json.loads(path.read_text(encoding="utf-8")) for path in HERE.glob("data-*.json")]
found.sort(key=lambda result: result["minibatches"])
for workers, line in (("16", "--"), ("64", "-")):
    for method, (name, color) in SHOWN.items():
        points = [
            (result["minibatches"] / (result["period"] * int(workers)), 100 * (loss / result["serial"] - 1))
            for result in found
            if (loss := result["loss"][method][workers]) is not None
        ]
        axes.plot(
            *zip(*points, strict=True), line, marker="o", markersize=4, color=color, label=f"{name}, N = {workers}"
        )
axes.axhline(0, color="black", linewidth=0.8)
axes.axhspan(-1, 1, color="black", alpha=0.1, label="within 1 % of one worker")
axes.set(xscale="log", xlabel="blocks", ylabel="loss over that of one worker with the same data, %")
axes.xaxis.set_major_formatter("{x:g}")
axes.grid(alpha=0.3)
axes.legend(fontsize="small", frameon=False)
figure.savefig(HERE / "data.png", dpi=110)
