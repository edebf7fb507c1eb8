# SPDX-License-Identifier: Apache-2.0
"""Draws the record: what a commit, a join and the start take with more and more members, before and after."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "commit_ms": "a commit, ms",
    "join_worst_ms": "the slowest of 20 joins, ms",
    "start_s": "until all members hold the state, s",
    "member_kb": "memory of a member, kB",
}
LIMITS = {"commit_ms": 20.0, "join_worst_ms": 1000.0, "member_kb": 1000.0}


def main(folder: Path) -> None:
    """Read before.json and result.json, and write plot.png."""
    here = Path(__file__).parent
    shown = {"before": (here / "before.json", "#999999"), "now": (folder / "result.json", "#0072b2")}
    figure, panels = plt.subplots(1, len(PANELS), figsize=(15, 4))
    for axes, (name, label) in zip(panels, PANELS.items(), strict=True):
        for version, (path, color) in shown.items():
            points = json.loads(path.read_text(encoding="utf-8"))[name]
            axes.plot([int(n) for n in points], list(points.values()), "o-", color=color, label=version)
        if name in LIMITS:
            axes.axhline(LIMITS[name], color="#d55e00", linestyle=":", label="asked")
        axes.set(xscale="log", yscale="log", xlabel="members", title=label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "plot.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
