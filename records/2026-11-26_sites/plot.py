# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from sites.json: minibatches in the model over time, and when a site's cable was out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    """A line for each run, and what workers alone would make."""
    folder = Path(sys.argv[1])
    found = json.loads((folder / "sites.json").read_text(encoding="utf-8"))
    plt.rcParams.update({"font.size": 12})
    figure, axes = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    if "timelines" in found:
        last = max(rows[-1][0] for rows in found["timelines"].values())
        axes.plot(
            [0, last],
            [0, last * found["sites"] / min(found["alone_s"])],
            "--",
            color="C7",
            label="two workers that exchange nothing",
        )
        for (name, rows), color in zip(found["timelines"].items(), ("C0", "C1"), strict=True):
            label = "undisturbed" if name == "undisturbed" else "a cable pulled twice"
            axes.step(*zip(*rows, strict=True), where="post", color=color, label=label)
        for begin, end in found["pulled_s"]:
            axes.axvspan(begin, end, color="C1", alpha=0.25, linewidth=0)
        axes.set_ylim(0, 1.1 * max(rows[-1][1] for rows in found["timelines"].values()))
    axes.set_xlabel("seconds since the first worker began")
    axes.set_ylabel("minibatches in the model")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=10, loc="lower right")
    figure.savefig(folder / "plot.png", dpi=120)


if __name__ == "__main__":
    main()
