# SPDX-License-Identifier: Apache-2.0
"""The pictures of `blocks.py`: loss by N and method, by gain, by period, by rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLES = {
    "sync_linear": ("C0", "--"),
    "sync_best": ("C0", "-"),
    "averaging": ("C2", "--"),
    "averaging_best": ("C2", "-"),
    "bmuf_paper": ("C4", "-"),
    "bmuf_paper_ramped": ("C4", "--"),
    "bmuf_paper_classical": ("C1", "-"),
    "bmuf_paper_classical_ramped": ("C1", "--"),
    "diloco_paper": ("C5", "-"),
    "bmuf": ("C3", "-"),
    "ours": ("C3", "-"),
    "bmuf_compensated": ("C3", "--"),
    "bmuf_adam": ("C3", "--"),
    "bmuf_adam_beta1_kept": ("C3", ":"),
}
"""Color and line of a method; a family has one color, and ours a thick line."""
OURS = "C3"
CUT = 0.3
"""What is worse than the best by more than this share is an arrow at the upper edge, or the rest would be one line."""
DEFAULT = 0.7
"""The exponent of the gain that the library takes, drawn as a dotted line."""
NAMES = {
    "table": ("workers", "Methods by number of workers"),
    "gain": ("gain", "Gain of block momentum"),
    "period": ("period, minibatches", "Period"),
    "rate": ("local learning rate", "Local learning rate"),
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a study's result, as `blocks.py` prints it, into `path`."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    study = result["study"]
    bottom, top = _limits(result)
    for index, method in enumerate(result["loss"]):
        _curve(axes, result, method, index, top)
    if result["serial"] is not None:
        axes.axhline(result["serial"], color="black", linewidth=1, label="serial")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    if study in ("table", "period"):
        axes.set_xticks(_places(result))
    axes.set_xlabel(NAMES[study][0])
    axes.set_ylabel(result.get("measure", "held-out cross-entropy, nats"))
    axes.set_ylim(bottom, top)
    if top > 2 * bottom > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title(f"{NAMES[study][1]}: {result['minibatches']:,} minibatches in all, {result['optimizer']}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _curve(axes: Axes, result: dict[str, Any], method: str, index: int, top: float) -> None:
    """A method's mean over seeds, its spread, and what does not fit into the picture."""
    losses, spreads = result["loss"][method], result["spread"][method]
    color, line = STYLES.get(method, (f"C{index}", "-"))
    # Side by side where many share a place.
    shift = 2.0 ** (0.05 * (index - len(result["loss"]) / 2)) if result["study"] == "table" else 1.0
    places = sorted(losses, key=float)
    seen = [place for place in places if losses[place] is not None and losses[place] <= top]
    axes.errorbar(
        [float(place) * shift for place in seen],
        [losses[place] for place in seen],
        yerr=[spreads[place] or 0.0 for place in seen],
        label=method.replace("_", " "),
        color=color,
        linewidth=2.5 if method in STYLES and color == OURS else 1.2,
        linestyle=line,
        marker="o",
        markersize=4,
        capsize=3,
    )
    beyond = [float(place) * shift for place in places if place not in seen]
    axes.plot(beyond, [top] * len(beyond), linestyle="", marker="^", color=color, clip_on=False)
    if result["study"] == "gain":
        axes.axvline(float(method.removeprefix("N")) ** DEFAULT, color=color, linewidth=0.8, linestyle=":")


def _limits(result: dict[str, Any]) -> tuple[float, float]:
    """The lower and the upper edge."""
    found = [loss for losses in result["loss"].values() for loss in losses.values() if loss is not None]
    found += [] if result["serial"] is None else [result["serial"]]
    if not found:
        return 0.0, 1.0
    lowest = min(found)
    best = [min(one for one in losses.values() if one is not None) for losses in result["loss"].values() if losses]
    bound = max(best) if result["study"] == "gain" else lowest  # of gains the best at each N is to be seen
    highest = min(max(found), bound * (1 + CUT))
    margin = 0.05 * (highest - lowest) or 0.01 * lowest
    return lowest - margin, highest + margin


def _places(result: dict[str, Any]) -> list[float]:
    return sorted({float(place) for losses in result["loss"].values() for place in losses})
