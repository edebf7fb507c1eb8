# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from results.json."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
rows = json.loads((HERE / "results.json").read_text(encoding="utf-8"))["rows"]
figure, axes = plt.subplots(figsize=(5.5, 4.5), layout="constrained")
for k, rule in enumerate(dict.fromkeys(row["rule"] for row in rows)):
    mine = [row for row in rows if row["rule"] == rule]
    axes.scatter([row["forecast_ms"] for row in mine], [row["measured_ms"] for row in mine], color=f"C{k}", label=rule)
ends = [90, 7000]
axes.plot(ends, ends, color="black", linewidth=0.8)
axes.fill_between(ends, [0.95 * x for x in ends], [1.05 * x for x in ends], color="black", alpha=0.1, label="5 %")
axes.set(xscale="log", yscale="log", xlabel="forecast, ms a step", ylabel="measured, ms a step")
axes.legend(frameon=False)
figure.savefig(HERE / "plot.png", dpi=100)
