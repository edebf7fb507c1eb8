# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png: the loss over one worker's by N and method, with SGD and with Adam."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

RESULTS = Path(sys.argv[1])
SGD = {
    "averaging": "averaging",
    "asgd": "asynchronous",
    "sync": "synchronous, the best rate",
    "diloco": "DiLoCo's constants",
    "cold": "block momentum",
    "cold-period=1": "in blocks of 1",
}
ADAM = {
    "uncompensated-beta1=0.9": "moments averaged, beta1 0.9",
    "cold-beta1=0.9": "compensated, beta1 0.9",
    "sync": "synchronous",
    "cold": "compensated, beta1 0.5",
    "cold-period=1": "in blocks of 1",
}
COLORS = {"cold": "C3", "cold-period=1": "C3", "sync": "C2", "diloco": "C1", "asgd": "C5", "averaging": "C4"}
COLORS |= {"uncompensated-beta1=0.9": "C4", "cold-beta1=0.9": "C0"}


def cells(*names: str) -> list[dict[str, Any]]:
    """Of those files that there are."""
    paths = [RESULTS / f"{name}.json" for name in names]
    return [row for path in paths if path.is_file() for row in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def draw(axes: Any, title: str, names: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """One panel."""
    for kind, name in names.items():
        mine = [row for row in rows if kind == (row["method"] if kind != "sync" else row["method"].partition("-")[0])]
        counts = sorted({row["workers"] for row in mine})
        best = [min(100 * row["over_serial"] for row in mine if row["workers"] == n) for n in counts]
        axes.plot(counts, best, color=COLORS[kind], marker="*" if kind == "cold-period=1" else "o", label=name)
    counts = sorted({row["workers"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yscale("symlog", linthresh=1)
    axes.set_yticks([-1, 0, 1, 3, 10, 30], ["-1", "0", "1", "3", "10", "30"])
    axes.set_ylim(top=100)
    axes.set(xlabel="workers", ylabel="loss over one worker's, %", title=title)
    axes.axhline(0, color="black", linewidth=1)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


plt.rcParams.update({"font.size": 13, "lines.linewidth": 2, "legend.fontsize": 11})
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.6), layout="constrained")
draw(left, "SGD", SGD, cells("four", "table", "more", "others", "asgd_few", "many"))
draw(right, "Adam", ADAM, cells("adam", "adam_many"))
figure.savefig(RESULTS / "plot.png", dpi=150)
