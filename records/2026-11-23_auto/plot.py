# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from result.json: a step of every rule on each link."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    """A panel for each link."""
    folder = Path(sys.argv[1])
    found = json.loads((folder / "result.json").read_text(encoding="utf-8").splitlines()[-1])
    links = found["step_ms"]
    figure, panels = plt.subplots(1, len(links), figsize=(4.6 * len(links), 3.8), layout="constrained", squeeze=False)
    for axes, (link, rows) in zip(panels[0], links.items(), strict=True):
        rules = sorted(rows, key=lambda rule: rows[rule])
        axes.barh(rules, [rows[rule] for rule in rules], color=["#c8553d" if r == "auto" else "#4878a8" for r in rules])
        axes.axvline(found["compute_ms"], color="black", linewidth=0.8)
        for place, rule in enumerate(rules):
            axes.text(rows[rule], place, f" {rows[rule]:.0f}", va="center", fontsize=7)
        axes.set_xscale("log")
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=7)
        name = link if link == "loopback" else f"{float(link) / 1000:g} Gbit/s"
        axes.set_title(f"{name}: ms a minibatch; the line is computing alone", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "plot.png", dpi=110)


if __name__ == "__main__":
    main()
