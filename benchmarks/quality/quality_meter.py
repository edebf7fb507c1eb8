# SPDX-License-Identifier: Apache-2.0
"""How many workers all are worth, as a run measures it: what that measure forecasts of runs with more workers.

From a run with few workers, the held-out loss of many after as many samples
(`paceline_plugins.forecast.planner.quality`), beside that which they come to. Workers are stacked
(`_quality_tasks.py`); their rates are one worker's times N^0.29, and nothing else is tuned. `unchanged_error` is that
of the forecast that many workers end where few do.

    python benchmarks/quality/quality_meter.py [--tasks chars-sgd chars-adam lines]
        [--first 4] [--workers 16 64] [--minibatches 32768] [--seeds 3] [--out out/quality_meter] [--quick]

Finished trainings are kept in `--out`. The last line is a JSON object: `forecast_error` and `unchanged_error` (task ->
the largest of all N and seeds, relative), `cells` (task, workers, seed, `first_loss`,
`forecast`, `measured`, `error`, `effective_forecast`, `effective_measured`, and the correlation of two workers'
displacements in the second quarter of the samples, `alike_first` and `alike_measured`) and `tasks_within`, those whose
error is 0.03 at most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from _quality_forecast import Row, forecasts, train
from _quality_tasks import TASKS
from _trainings import leave, rows_of

from paceline_plugins.forecast.planner.quality import correlation

WISHED = 0.03
"""The largest relative error of a forecast that is called near."""


def forecast(args: argparse.Namespace) -> dict[str, Any]:
    """Train what is missing, and compare."""
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        (f"{task}_{workers}_{args.minibatches}", seed)
        for seed in range(args.seeds)
        for task in args.tasks
        for workers in (args.first, *args.workers)
    ]
    rows = dict(zip(wanted, rows_of(args.out, wanted, 1, partial(make, args)), strict=True))
    cells = [one for task in args.tasks for seed in range(args.seeds) for one in compared(args, rows, task, seed)]
    errors, unchanged = {}, {}
    for task in args.tasks:
        mine = [one for one in cells if one["task"] == task]
        errors[task] = max(abs(one["error"]) for one in mine)
        unchanged[task] = max(abs(one["first_loss"] / one["measured"] - 1) for one in mine)
    return {
        "forecast_error": errors,
        "unchanged_error": {task: round(error, 4) for task, error in unchanged.items()},
        "tasks_within": [task for task, error in errors.items() if error <= WISHED],
        "cells": cells,
    }


def compared(args: argparse.Namespace, rows: dict[tuple[str, int], Row], task: str, seed: int) -> list[Row]:
    """The forecasts of a task, beside what was measured."""
    first = rows[f"{task}_{args.first}_{args.minibatches}", seed]
    cells = []
    for found in forecasts(TASKS[task], first, args.first, args.workers):
        row = rows[f"{task}_{found.workers}_{args.minibatches}", seed]
        cell = {"task": task, "workers": found.workers, "seed": seed, "first_loss": round(first["loss"], 4)}
        cell |= {"forecast": round(found.loss, 4), "measured": round(row["loss"], 4)}
        cell |= {"error": round(found.loss / row["loss"] - 1, 4), "effective_forecast": round(found.effective, 2)}
        cell |= {"effective_measured": round(statistics.fmean(row["effective"]), 2)}
        cells.append(cell | {"alike_first": alike(first, args.first), "alike_measured": alike(row, found.workers)})
        print(
            f"{task:11} seed {seed}  {args.first} workers {cell['first_loss']:.4f}  {found.workers:3} workers: "
            f"forecast {cell['forecast']:.4f}, measured {cell['measured']:.4f}, {100 * cell['error']:+5.1f} %"
        )
    return cells


def alike(row: Row, workers: int) -> float:
    """The mean correlation of two workers' displacements in the second quarter of a training."""
    blocks = len(row["effective"])
    part = row["effective"][blocks // 4 : blocks // 2] or row["effective"]
    return round(statistics.fmean(correlation(effective, workers) for effective in part), 4)


def make(args: argparse.Namespace, name: str, seed: int) -> None:
    """One training, of the name of its file."""
    task, workers, minibatches = name.rsplit("_", 2)
    leave(args.out, (name, seed), train(TASKS[task], int(workers), int(minibatches), seed, args.out))


def parse() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["chars-sgd", "chars-adam", "lines"])
    parser.add_argument("--first", type=int, default=4, help="workers of the run from which others are forecast")
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--minibatches", type=int, default=32_768)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/quality_meter"))
    return _quick.parse(parser, tasks=["chars-sgd"], first=4, workers=[8], minibatches=256, seeds=1)


def main() -> None:
    """Measure, and print the figures."""
    args = parse()
    torch.set_num_threads(1)
    print(json.dumps(forecast(args)))


if __name__ == "__main__":
    main()
