# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png: each row's waiting and processor time an exchange, on each network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = (("C0", "o"), ("C0", "s"), ("C3", "o"), ("C3", "s"))
PANELS = {
    "exposed_ms": "training waits, ms an exchange",
    "processor_ms": "processors, ms an exchange",
}
LEAST_MS = 1.0  # what is below, or not above the noise, is drawn here


def main() -> None:
    """A dot for each row and network."""
    folder = Path(sys.argv[1])
    medians = json.loads((folder / "all.json").read_text(encoding="utf-8"))["medians"]
    plt.rcParams.update({"font.size": 12})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 6.5), layout="constrained", sharey=True)
    rows: list[str] = []
    for (network, found), (color, marker) in zip(medians.items(), STYLES, strict=False):
        rows = rows or [row for row in found if row != "no_exchange"]
        for panel, column in zip(axes, PANELS, strict=True):
            _draw(panel, rows, found, column, {"color": color, "marker": marker, "label": network})
    for panel, label in zip(axes, PANELS.values(), strict=True):
        panel.set_xscale("log")
        panel.set_xlabel(label)
        panel.grid(axis="x", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].invert_yaxis()
    axes[1].legend(frameon=False, fontsize=10, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(folder / "plot.png", dpi=120)


def _draw(panel: Any, rows: list[str], found: dict[str, Any], column: str, style: dict[str, Any]) -> None:
    """One network's dots."""
    there = [(number, found[row][column]) for number, row in enumerate(rows) if row in found]
    places = [(max(LEAST_MS, value), number) for number, value in there if value is not None]
    panel.plot(*zip(*places, strict=True), linestyle="", alpha=0.8, **style)


if __name__ == "__main__":
    main()
