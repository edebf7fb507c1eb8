# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from network.json and codecs.json beside it."""

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
    """Two pictures side by side."""
    network = json.loads((HERE / "network.json").read_text())
    codecs = json.loads((HERE / "codecs.json").read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    bars(left, network["efficiency"], "scaling efficiency of 8 workers, links of 1 Gbit/s and 1 ms", "{:.3f}")
    bars(right, codecs["copies"], "encode and decode of 100 MB, in copies of it", "{:.1f}")
    figure.savefig(HERE / "plot.png", dpi=110)


if __name__ == "__main__":
    main()
