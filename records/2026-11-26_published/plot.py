# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png: by how much the forecast utilisation is off the published one, by what is known of the cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = {"nominal": "nominal rate", "measured": "measured rate", "slowest": "and the slowest\nworker's pace"}


def main() -> None:
    """A pair of bars, median and worst, for each forecast."""
    folder = Path(sys.argv[1])
    read = json.loads((folder / "published.json").read_text(encoding="utf-8"))
    plt.rcParams.update({"font.size": 12})
    figure, places = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    for axes, rule, title in zip(places, ("diloco", "averaging"), ("DiLoCo", "local SGD"), strict=True):
        for shift, (key, label, color) in enumerate((("median_error", "median", "C0"), ("worst_error", "worst", "C7"))):
            values = [100 * read[key][f"{rule}_{known}"] for known in LABELS]
            axes.bar([k + 0.36 * (shift - 0.5) for k in range(len(values))], values, 0.34, label=label, color=color)
        for wanted in (5, 15):
            axes.axhline(wanted, color="black", linewidth=1, linestyle=":")
        axes.set_xticks(range(len(LABELS)), LABELS.values(), fontsize=10)
        axes.set_title(title, fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
    places[0].set_ylabel("error of the forecast, %")
    places[0].legend(frameon=False)
    figure.savefig(folder / "plot.png", dpi=120)


if __name__ == "__main__":
    main()
