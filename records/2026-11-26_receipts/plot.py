# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from cost.json: what training with receipts takes over training without."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    """A bar for each rule."""
    folder = Path(sys.argv[1])
    read = json.loads((folder / "cost.json").read_text(encoding="utf-8"))
    worked = read["processor"]
    plt.rcParams.update({"font.size": 12})
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.bar(range(len(worked)), [value - 1 for value in worked.values()], 0.5, bottom=1, color="C0")
    for place, value in enumerate(worked.values()):
        axes.annotate(f"{value:.3f}", (place, value), (0, 3), textcoords="offset points", ha="center")
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(worked)), [name.replace("bmuf", "blocks of ") for name in worked])
    axes.set_ylabel("processor seconds,\nwithout receipts = 1")
    axes.set_ylim(min(1, *worked.values()), max(1.1, 1.05 * max(worked.values())))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "plot.png", dpi=120)


if __name__ == "__main__":
    main()
