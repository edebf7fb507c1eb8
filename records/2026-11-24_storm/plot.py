# SPDX-License-Identifier: Apache-2.0
"""Draws the record: the faults that happened, and the seeds that each planted bug took."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(folder: Path) -> None:
    """Read result.json, and write plot.png."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 10), width_ratios=(2, 3))
    faults = sorted(result["faults"].items(), key=lambda one: one[1])
    left.barh([name.replace("_", " ") for name, _ in faults], [count for _, count in faults], color="#0072b2")
    left.set_xlabel("times that it happened")
    seeds_of_all = sum(result[name] for name in ("seeds", "run_seeds", "server_seeds", "steps_seeds"))
    left.set_title(f"faults in {seeds_of_all:,} seeds")
    mutants = sorted(result["mutants"].items(), key=lambda one: -1 if one[1] is None else -one[1])
    seeds = [0 if seed is None else seed + 1 for _, seed in mutants]
    right.barh([name for name, _ in mutants], seeds, color="#d55e00")
    for place, (_, seed) in enumerate(mutants):
        right.text(seeds[place] * 1.05 + 0.05, place, "not found" if seed is None else str(seed + 1), va="center")
    right.set_xscale("symlog", linthresh=1)
    right.set_xlim(0, 3000)
    right.set_xlabel("seeds until it was found")
    right.set_title("planted bugs")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(folder / "plot.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
