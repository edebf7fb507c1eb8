# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from timeline.json beside it: the workers' lives, what happened, how long exchanges took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
MARKS = {"kill": "x", "stop": "s", "cut": "D", "loss": "v", "nan": "*", "join": ">", "leave": "<", "launcher": "P"}
COLOURS = {"kill": "#b03030", "stop": "#c08020", "cut": "#806040", "loss": "#7060a0", "nan": "#208040"}


def lives(axes: plt.Axes, line: dict[str, Any]) -> None:
    """A bar for the times in which each worker could work; a mark where something was done."""
    for worker, spans in line["lives"].items():
        host = line["hosts"][worker]
        for begin, end in spans:
            axes.barh(host, end - begin, left=begin, height=0.55, color="#4878a8", edgecolor="white", linewidth=0.4)
    shown = set()
    for fault in line["faults"]:
        kind = fault["kind"]
        label = None if kind in shown else kind
        shown.add(kind)
        axes.scatter(
            fault["at"], fault["host"], marker=MARKS.get(kind, "o"), color=COLOURS.get(kind, "#303030"), zorder=3, s=34,
            label=label,
        )  # fmt: skip
    axes.set_ylabel("host")
    axes.invert_yaxis()
    axes.legend(fontsize=7, ncols=9, loc="upper center", bbox_to_anchor=(0.5, 1.12), frameon=False)


def exchanges(axes: plt.Axes, line: dict[str, Any]) -> None:
    """How long each exchange took from when the last worker came, and how long the first had waited."""
    axes.plot([e["at"] for e in line["exchanges"]], [e["waited_s"] for e in line["exchanges"]], color="#c08020",
              lw=0.8, label="the first worker waited")  # fmt: skip
    axes.plot([e["at"] for e in line["exchanges"]], [e["took_s"] for e in line["exchanges"]], color="#4878a8",
              lw=0.8, label="from the last worker's arrival")  # fmt: skip
    axes.set_ylabel("exchange, s")
    axes.set_xlabel("seconds of the run")
    axes.legend(fontsize=7, frameon=False)


def main() -> None:
    """Lives above, exchanges below."""
    line = json.loads((HERE / "timeline.json").read_text())
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(11, 6), sharex=True, layout="constrained", height_ratios=(3, 2)
    )
    lives(above, line)
    exchanges(below, line)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "plot.png", dpi=110)


if __name__ == "__main__":
    main()
