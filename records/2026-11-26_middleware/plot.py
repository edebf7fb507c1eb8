# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from the three tables: the held-out errors over one worker's, by N and method."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(sys.argv[1])
TASKS = {
    "chat": ("LSTM chat: words", 4, -1.65),
    "blstm": ("BLSTM: frames of speech", 8, 0.8),
    "pictures": ("AlexNet's shape: pictures", 4, 3.7),
}
METHODS = {
    "asgd": ("asgd", "C4"),
    "dcasgd": ("dc_asgd", "C2"),
    "asgd-height=0.5": ("asgd at half the rate", "C1"),
    "averaging": ("averaging", "C0"),
    "cold": ("block momentum", "C3"),
    "averaging-rate=0": ("averaging, one worker's rate", "C9"),
    "cold-rate=0": ("block momentum, one worker's rate", "C1"),
    "sync-rate=0.5-ramp=0.1": ("synchronous", "C2"),
}

MORE = {"chat": ("chat_half", "chat_seeds"), "blstm": ("blstm_seeds",), "pictures": ("pictures_sync",)}


def cells(name: str) -> list[dict]:
    """Of a table; none where the quick form leaves it out."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else []


plt.rcParams.update({"font.size": 12, "lines.linewidth": 2, "legend.fontsize": 10})
figure, row = plt.subplots(1, 3, figsize=(11.4, 3.9), layout="constrained")
for axes, (task, (title, cards, theirs)) in zip(row, TASKS.items(), strict=True):
    found = [cell for name in (task, *MORE.get(task, ())) for cell in cells(name)]
    for method in dict.fromkeys(cell["method"] for cell in found):
        # the last of several tables has more seeds
        points = sorted({c["workers"]: 100 * c["error_over_serial"] for c in found if c["method"] == method}.items())
        name, color = METHODS[method]
        axes.plot(*zip(*points, strict=True), color=color, marker="o", label=name)
    axes.plot([cards], [theirs], "k*", markersize=12, label="the article")
    counts = sorted({cell["workers"] for cell in found} | {cards})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.axhline(0, color="black", linewidth=1)
    axes.set(title=title, xlabel="workers")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
row[0].set_ylabel("errors over one worker's, %")
figure.savefig(RESULTS / "plot.png", dpi=150)
