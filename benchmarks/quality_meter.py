# SPDX-License-Identifier: Apache-2.0
"""What it costs to measure how many workers all are worth, and what the measure forecasts.

Cost: two processes hold a 100 MB fp32 model (25 tensors of 4 MB) and make `bmuf` synchronisations of it over loopback,
in turn with the norms of the mean displacement taken and without. The norms of the workers' own displacements are taken
either way: the guard against outliers needs them. The figure is the median difference over the median of those without.

Forecast: from a run with few workers, the held-out loss of many after as many samples
(`paceline_plugins.forecast.planner.quality`), beside that which they come to. Workers are stacked
(`_quality_tasks.py`); their
rates are one worker's times N^0.29, and nothing else is tuned. `unchanged_error` is that of the forecast that many
workers end where few do.

    python benchmarks/quality_meter.py [--parts cost forecast] [--repeats 30] [--tasks chars-sgd chars-adam lines]
        [--first 4] [--workers 16 64] [--minibatches 32768] [--seeds 3] [--out out/quality_meter] [--quick]

Finished trainings are kept in `--out`. The last line is a JSON object: `cost` (in parts of a synchronisation),
`effective` (what was measured, of 2), `forecast_error` and `unchanged_error` (task -> the largest of all N and seeds,
relative), `cells` (task, workers, seed, `first_loss`, `forecast`, `measured`, `error`, `effective_forecast`,
`effective_measured`, and the correlation of two workers' displacements in the second quarter of the samples,
`alike_first` and `alike_measured`) and `tasks_within`, those whose error is 0.03 at most.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import _quick
import torch
import torch.distributed as dist
from _quality_forecast import Row, forecasts, train
from _quality_tasks import TASKS
from _trainings import leave, rows_of
from _workers import answer, is_worker, launch
from sync_cost import attached, timed

from paceline.update.engine.blocks.outer_state import ParameterState
from paceline_plugins.forecast.planner.quality import correlation

WARM = 4
"""Pairs before the first that counts."""
WISHED = 0.03
"""The largest relative error of a forecast that is called near."""


def worker(repeats: int) -> None:
    """One rank: synchronisations with and without, in turn."""
    model, optimizer, run = attached()
    states = [one for one in gc.get_objects() if isinstance(one, ParameterState)]
    rows: dict[bool, list[float]] = {True: [], False: []}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for repeat in range(repeats + WARM):
        for measured in (True, False) if repeat % 2 else (False, True):
            with torch.no_grad():
                for weight in model.weights:
                    weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.01)
            for state in states:
                state.sum_mean_norms()
                state.mean_norms = {} if measured else None
            rows[measured].append(timed(optimizer.step))  # no gradients: the step is the synchronisation
    effective = states[0]._numbers.diversity.effective
    run.close()
    pairs = list(zip(rows[True], rows[False], strict=True))[WARM:]
    more = statistics.median(one - other for one, other in pairs)
    answer({"more_s": more, "without_s": statistics.median(other for _, other in pairs), "effective": effective})


def cost(repeats: int) -> dict[str, Any]:
    """Measure the cost."""
    found = launch(__file__, ["--repeats", str(repeats)], 2, 600)
    print(f"without: {1e3 * found['without_s']:.1f} ms; measuring adds {1e3 * found['more_s']:.2f} ms")
    effective = found["effective"] and round(found["effective"], 3)
    return {"cost": round(found["more_s"] / found["without_s"], 4), "effective": effective}


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
    parser.add_argument("--parts", nargs="+", choices=["cost", "forecast"], default=["cost", "forecast"])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["chars-sgd", "chars-adam", "lines"])
    parser.add_argument("--first", type=int, default=4, help="workers of the run from which others are forecast")
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--minibatches", type=int, default=32_768)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/quality_meter"))
    return _quick.parse(parser, repeats=2, tasks=["chars-sgd"], first=4, workers=[8], minibatches=256, seeds=1)


def main() -> None:
    """Measure, and print the figures."""
    args = parse()
    if is_worker():
        worker(args.repeats)
        return
    torch.set_num_threads(1)
    figures = cost(args.repeats) if "cost" in args.parts else {}
    if "forecast" in args.parts:
        figures |= forecast(args)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
