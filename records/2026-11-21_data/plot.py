# SPDX-License-Identifier: Apache-2.0
"""plot.png: loaders beside their peers, and rates of objects.

python plot.py loaders.json objects.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
NAMES = {"bare": "DataLoader", "ours": "run.share", "stateful": "StatefulDataLoader"}


def bars(axis: Any, names: list[str], values: list[float], title: str, unit: str) -> None:
    """Horizontal bars with their values."""
    colours = ["tab:orange" if name in ("run.share", "cache") else "tab:grey" for name in names]
    drawn = axis.barh(names, values, color=colours)
    axis.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(unit, fontsize=9)
    axis.margins(x=0.3)
    axis.set_xticks([])


def main() -> None:
    """Draw it."""
    rates = json.loads((HERE / sys.argv[1]).read_text())["rates"]
    objects = json.loads((HERE / sys.argv[2]).read_text())["objects"]["mb_per_s"]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
    names = [NAMES.get(name, name) for name in rates]
    bars(axes[0], names, [found["in_process"] for found in rates.values()], "in process", "samples of 1 KB a second")
    bars(axes[1], names, [found["one_process"] for found in rates.values()], "one process", "samples of 1 KB a second")
    bars(axes[2], list(objects), list(objects.values()), "objects of 16 MB, 4 threads", "MB/s")
    figure.savefig(HERE / "plot.png", dpi=110)


if __name__ == "__main__":
    main()
