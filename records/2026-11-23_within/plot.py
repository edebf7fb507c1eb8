# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from result.json: what each method costs and what it saves, beside the mildest setting."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"curve": "C3", "branches": "C0", "unbounded": "C7", "curve-grow": "C1", "unbounded-grow": "C8"}


def main() -> None:
    """A panel for each task."""
    folder = Path(sys.argv[1])
    cells = json.loads((folder / "result.json").read_text(encoding="utf-8").splitlines()[-1])["cells"]
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    plt.rcParams.update({"font.size": 12})
    figure, panels = plt.subplots(1, len(tasks), figsize=(5.2 * len(tasks), 4.2), layout="constrained", squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        for cell in cells:
            if cell["task"] == task and cell["method"] in COLORS:
                over = [100 * one for one in cell["over_mild"]]
                at = [cell["time_over_mild"]] * len(over)
                axes.plot(at, over, "o", color=COLORS[cell["method"]], label=cell["method"])
        axes.axhspan(-10, 1, color="C2", alpha=0.1)
        axes.axhline(1.0, color="C2", linewidth=1)
        axes.set(title=task, xlabel="time, mildest setting = 1", ylabel="loss over the mildest setting's, %")
        axes.set_yscale("symlog", linthresh=1.5)
        axes.set_xlim(0.72, 1.03)
        axes.set_xticks([0.8, 0.9, 1.0])
        axes.set_ylim(-1.5, 40)
        axes.set_yticks([-1, 0, 1, 2, 5, 10, 20], ["-1", "0", "1", "2", "5", "10", "20"])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=10)
    figure.savefig(folder / "plot.png", dpi=120)


if __name__ == "__main__":
    main()
