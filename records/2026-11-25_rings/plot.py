# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from after.json and before.json: the rates of rings and of bare sockets over gloo's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BARS = (
    ("before", "ring", "ring, before", "C7"),
    ("after", "ring", "ring, now", "C0"),
    ("after", "bare", "bare sockets", "C2"),
    ("after", "tls", "ring with TLS, now", "C1"),
)


def main() -> None:
    """A group of bars for each network."""
    folder = Path(sys.argv[1])
    read: dict[str, Any] = {}
    for name in ("before", "after"):
        path = folder / f"{name}.json"
        read[name] = json.loads(path.read_text(encoding="utf-8"))["rate"] if path.exists() else {}
    networks = list(read["after"])
    plt.rcParams.update({"font.size": 12})
    figure, axes = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    for shift, (when, way, label, color) in enumerate(BARS):
        rows = [read[when].get(network) for network in networks]
        rates = [row[way] if row else 0.0 for row in rows]
        axes.bar([k + 0.2 * (shift - 1.5) for k in range(len(networks))], rates, 0.18, label=label, color=color)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(networks)), networks)
    axes.set_ylabel("rate, gloo = 1")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=10, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.12))
    figure.savefig(folder / "plot.png", dpi=120)


if __name__ == "__main__":
    main()
