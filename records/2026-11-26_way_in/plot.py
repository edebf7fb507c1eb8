# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png: what is typed, what is changed, and the seconds to the first step, by way."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {"commands": "commands typed", "changed": "lines changed", "over_ddp": "time to the first step, DDP = 1"}


def main() -> None:
    """A bar for each way in each panel."""
    folder = Path(sys.argv[1])
    ways = json.loads((folder / "ways.json").read_text(encoding="utf-8"))["ways"]
    plt.rcParams.update({"font.size": 12})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3), layout="constrained", sharey=True)
    for panel, (key, label) in zip(axes, PANELS.items(), strict=True):
        values = [row["added"] + row["removed"] if key == "changed" else row[key] for row in ways.values()]
        bars = panel.barh(list(ways), values, color=["C0" if "paceline" in name else "C7" for name in ways])
        panel.bar_label(bars, padding=3)
        panel.set_xlim(0, 1.2 * max(values))
        panel.set_xlabel(label)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(folder / "plot.png", dpi=120)


if __name__ == "__main__":
    main()
