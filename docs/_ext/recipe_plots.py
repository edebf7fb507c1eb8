# SPDX-License-Identifier: Apache-2.0
"""The picture of a recipe's page: the loss of one worker and of four, legible on light and on dark."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
from matplotlib.figure import Figure

GREY, ONE, FOUR = "#7d7d7d", "#9a8f2f", "#2a8fc4"
STYLE = {
    "svg.hashsalt": "paceline",  # the same bytes for the same curves
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def draw(name: str, results: dict[str, Any]) -> str:
    """An SVG of the training losses of `name` and of its optimizer on one worker."""
    row = results["trainings"][name]
    alone = results["trainings"][row["optimizer"]]
    total = results["setting"]["minibatches"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        for curve, label, colour in ((alone["curve"], "one worker", ONE), (row["curve"], "4 workers", FOUR)):
            places = [(k + 0.5) * total / len(curve) for k in range(len(curve))]
            axes.plot(places, curve, color=colour, linewidth=1.8, label=label)
        axes.set_xlabel("minibatches of all workers together")
        axes.set_ylabel("training loss, nats a character")
        axes.set_ylim(top=min(3.8, max(*alone["curve"][1:], *row["curve"][1:])))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False, title=f"{row['rule']}, {row['optimizer']}")
        return _svg(figure)


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return out.getvalue()
