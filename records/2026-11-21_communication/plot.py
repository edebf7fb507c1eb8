# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from network.json beside it."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def bars(axes: plt.Axes, values: dict[str, float], title: str, form: str) -> None:
    """Horizontal bars with their numbers."""
    names = list(values)
    axes.barh(names, [values[name] for name in names], color="#4878a8")
    for place, name in enumerate(names):
        axes.text(values[name], place, " " + form.format(values[name]), va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.18)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """The efficiencies."""
    network = json.loads((HERE / "network.json").read_text())
    figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
    bars(axes, network["efficiency"], "scaling efficiency of 8 workers, links of 1 Gbit/s and 1 ms", "{:.3f}")
    figure.savefig(HERE / "plot.png", dpi=110)


if __name__ == "__main__":
    main()
