# SPDX-License-Identifier: Apache-2.0
"""Draws quality.png from speech.json and others.json: the distance from one worker on speech, by N and method."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(sys.argv[1])
NAMES = {
    "grown": "grown",
    "cold": "all from the first step",
    "sync": "synchronous, the best",
    "diloco": "DiLoCo's constants",
    "averaging": "averaging",
}
files = [RESULTS / f"{name}.json" for name in ("speech", "others")]
cells = [row for path in files if path.is_file() for row in json.loads(path.read_text(encoding="utf-8"))["cells"]]
task = "small-speech" if any(row["task"] == "small-speech" for row in cells) else cells[0]["task"]
cells = [row for row in cells if row["task"] == task and row["over_serial"] is not None]

plt.rcParams.update({"font.size": 13, "lines.linewidth": 2, "legend.fontsize": 11})
figure, axes = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
for (kind, name), color in zip(NAMES.items(), ("C3", "C1", "C0", "C2", "C4"), strict=True):
    mine = [row for row in cells if row["method"].partition("-")[0] == kind]
    counts = sorted({row["workers"] for row in mine})
    best = [min(100 * row["over_serial"] for row in mine if row["workers"] == n) for n in counts]
    axes.plot(counts, best, color=color, marker="o", label=name)
counts = sorted({row["workers"] for row in cells})
axes.set_xscale("log", base=2)
axes.set_xticks(counts, [str(count) for count in counts])
axes.set_yscale("symlog", linthresh=1)
axes.set_yticks([0, 1, 3, 10, 30], ["0", "1", "3", "10", "30"])
axes.set(xlabel="workers", ylabel=f"{task.removeprefix('small-')}: loss over one worker's, %")
axes.axhline(0, color="black", linewidth=1)
axes.grid(alpha=0.3)
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
figure.savefig(RESULTS / "quality.png", dpi=150)
