# SPDX-License-Identifier: Apache-2.0
"""From the demo's output for some seeds: results.json, the table (printed) and plot.png, beside this file.

python table.py DEMO_OUTPUT ...
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent
WAYS = ("one-worker", "bmuf", "synchronous", "averaging")


def read(outputs: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Way -> its result for each seed; the quick form has the first two ways alone."""
    ways = [way for way in WAYS if way in WAYS[:2] or (outputs[0] / way).exists()]
    return {way: [json.loads((out / way / "result.json").read_text()) for out in outputs] for way in ways}


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["validation_loss"] for row in rows]


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: the loss of each seed, mean and range, and the difference to one worker of the same seed."""
    seeds = [row["seed"] for row in results["one-worker"]]
    head = ["way", "rule", *(f"seed {s}" for s in seeds), "mean", "range", "over one worker", "minibatches a worker"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    alone = losses(results["one-worker"])
    for way, rows in results.items():
        own = losses(rows)
        over = [100 * (b / a - 1) for a, b in zip(alone, own, strict=True)]
        cells = [way, f"`{rows[0]['rule']}`", *(f"{loss:.4f}" for loss in own), f"{statistics.mean(own):.4f}"]
        cells += [f"{max(own) - min(own):.4f}", f"{min(over):+.2f} to {max(over):+.2f} %"]
        cells += [f"{rows[0]['minibatches_per_worker']:,}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A point for every seed of every way, and its mean as a line."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    colours = ("#000000", "#0072b2", "#e69f00", "#cc79a7")
    for place, (rows, colour) in enumerate(zip(results.values(), colours, strict=False)):
        own = losses(rows)
        axes.plot([place] * len(own), own, "o", color=colour)
        axes.hlines(statistics.mean(own), place - 0.25, place + 0.25, color=colour)
    limit = 1.02 * statistics.mean(losses(results["one-worker"]))
    axes.axhline(limit, color="0.6", linestyle="--", linewidth=1)
    axes.annotate("2 % over one worker", (3.3, limit), ha="right", va="bottom", color="0.4")
    axes.set_xticks(range(len(results)), [f"{way}\n{rows[0]['rule']}" for way, rows in results.items()])
    axes.set_ylabel("validation loss [nats a character]")
    axes.grid(axis="y", color="0.9")
    figure.savefig(path, dpi=120)


def main() -> None:
    results = read([Path(argument) for argument in sys.argv[1:]])
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, HERE / "plot.png")
    print(table(results))


if __name__ == "__main__":
    main()
