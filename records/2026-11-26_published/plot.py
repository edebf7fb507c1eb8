# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png: errors of the forecast by what is known of the cluster, and the utilisation on emulated links."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
LABELS = {
    "nominal": "nominal\nrate",
    "measured": "measured\nrate",
    "slowest": "and slowest\nworker",
    "own": "and DDP's\nexchange",
}
RULES = {"diloco": "DiLoCo", "averaging": "local SGD", "sync": "DistributedDataParallel"}
PERIODS, EIGHTH = (32, 128), 8
RATES = (50, 200, 1000, 5000)
ROWS = {
    "paceline_streaming_4bit": ("streaming DiLoCo, 4 bit", "C2"),
    "paceline_bmuf_overlap": ("bmuf, overlap", "C0"),
    "paceline_streaming": ("streaming DiLoCo, fp32", "C1"),
    "paceline_diloco": ("DiLoCo", "C3"),
    "ddp": ("DDP", "C7"),
}
THEIRS = {32: (0.0214, 0.0897, 0.3371, 0.6595), 128: (0.0831, 0.2776, 0.6366, 0.8232)}
"""Published utilisation of DiLoCo at these rates."""


def errors(axes: Any, read: dict[str, Any], rule: str) -> None:
    """A pair of bars, median and worst, for each forecast of a rule."""
    known = [name for name in LABELS if f"{rule}_{name}" in read["median_error"]]
    for shift, (key, label, color) in enumerate((("median_error", "median", "C0"), ("worst_error", "worst", "C7"))):
        values = [100 * read[key][f"{rule}_{name}"] for name in known]
        axes.bar([k + 0.36 * (shift - 0.5) for k in range(len(values))], values, 0.34, label=label, color=color)
    for wanted in (5, 15):
        axes.axhline(wanted, color="black", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(known)), [LABELS[name] for name in known], fontsize=9)
    axes.set_title(RULES[rule], fontsize=12)


def grid(axes: Any, period: int) -> None:
    """Share of the time that computes, by the links' rate."""
    medians = json.loads((HERE / f"grid{period}.json").read_text(encoding="utf-8"))["medians"]
    networks = [medians[f"4 workers, {rate / EIGHTH:g} Mbit/s"] for rate in RATES]
    for row, (label, color) in ROWS.items():
        values = [100 * one["no_exchange"]["step_ms"] / one[row]["step_ms"] for one in networks]
        axes.plot(RATES, values, "o-", color=color, label=label)
    axes.plot(RATES, [100 * value for value in THEIRS[period]], "x", color="black", label="DiLoCo, published")
    axes.set_xscale("log")
    axes.set_xticks(RATES, [str(rate) for rate in RATES])
    axes.minorticks_off()
    axes.set_xlabel("Mbit/s")
    axes.set_title(f"an exchange in {period} minibatches", fontsize=12)


def main() -> None:
    """All panels."""
    folder = Path(sys.argv[1])
    read = json.loads((folder / "published.json").read_text(encoding="utf-8"))
    plt.rcParams.update({"font.size": 11})
    figure, (above, below) = plt.subplots(2, 3, figsize=(11, 7), layout="constrained")
    for axes, rule in zip(above, RULES, strict=True):
        errors(axes, read, rule)
    above[0].set_ylabel("error of the forecast, %")
    above[0].legend(frameon=False)
    for axes, period in zip(below, PERIODS, strict=False):
        grid(axes, period)
    below[0].set_ylabel("share that computes, %")
    below[2].axis("off")
    below[2].legend(*below[0].get_legend_handles_labels(), loc="center left", frameon=False)
    for axes in (*above, *below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "plot.png", dpi=110)


if __name__ == "__main__":
    main()
