# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from table.json: the frame errors over one worker's, by N and method."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(sys.argv[1])
NAMES = {
    "cold": "block momentum",
    "grown": "the same, grown",
    "diloco": "DiLoCo's constants",
    "averaging": "averaging",
}
cells = json.loads((RESULTS / "table.json").read_text(encoding="utf-8"))["cells"]

plt.rcParams.update({"font.size": 13, "lines.linewidth": 2, "legend.fontsize": 11})
figure, axes = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
for (kind, name), color in zip(NAMES.items(), ("C3", "C1", "C0", "C4"), strict=True):
    mine = sorted((row["workers"], row["error_over_serial"]) for row in cells if row["method"] == kind)
    axes.plot([n for n, _ in mine], [100 * error for _, error in mine], color=color, marker="o", label=name)
counts = sorted({row["workers"] for row in cells})
axes.set_xscale("log", base=2)
axes.set_xticks(counts, [str(count) for count in counts])
axes.set(xlabel="workers", ylabel="frame errors over one worker's, %")
axes.axhline(0, color="black", linewidth=1)
axes.grid(alpha=0.3)
axes.legend(frameon=False, loc="upper left")
figure.savefig(RESULTS / "plot.png", dpi=150)
