# SPDX-License-Identifier: Apache-2.0
"""Draws plot.png from workers.json: error and computed speed-up over the number of workers."""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

COLOURS = {"averaging": "#7a7a7a", "bmuf": "#0b1f45", "asgd": "#b3261e"}


def draw(found: dict[str, Any], path: Path) -> None:
    """Held-out errors of all seeds at the best rates, with lines through their means; and the planner's speed-up."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    errors, speeds = figure.subplots(1, 2)
    best = found["best"]
    alone = found["error_alone"][best["alone"]]
    errors.axhline(mean(alone), color="#222222", label="one worker")
    errors.axhspan(min(alone), max(alone), color="#222222", alpha=0.08)
    for method, by_rate in found["error"].items():
        by_workers = {count: errors[best[method][count]] for count, errors in by_rate.items()}
        counts = [int(count) for count in by_workers]
        style = {"color": COLOURS[method], "label": method}
        errors.plot(counts, [mean(values) for values in by_workers.values()], marker="o", **style)
        for count, values in zip(counts, by_workers.values(), strict=True):
            errors.plot([count] * len(values), values, ".", color=COLOURS[method], alpha=0.5)
        speed = found["speed_up"][method]
        speeds.plot([1, *map(int, speed)], [1.0, *speed.values()], marker="o", **style)
    for axis, ticks in ((errors, counts), (speeds, [1, *counts])):
        axis.set_xticks(ticks)
        axis.set_xlabel("workers")
        axis.legend(frameon=False)
    errors.set_ylabel("held-out frame error, %")
    speeds.plot([1, counts[-1]], [1, counts[-1]], ":", color="#222222")
    speeds.set_ylabel("speed-up computed for 1 Gbit/s")
    figure.savefig(path, dpi=130)


RESULTS = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
draw(json.loads((RESULTS / "workers.json").read_text(encoding="utf-8")), RESULTS / "plot.png")
