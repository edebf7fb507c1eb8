# SPDX-License-Identifier: Apache-2.0
"""How good, and how soon: many workers with nothing tuned for their number, beside one worker.

Every method has the rate that is best for one worker, times N^0.29 where N workers train (2503.09799), on the same
minibatches in the same order. Methods: `cold`, today's recipe with N workers from the first step; `amplified`, the same
with `amplify=0.5`; `grown`, amplified with a number of workers that grows to N (`paceline.rules.schedule.growth`).

Each training is made with 1, 2 and 4 times the samples. Two figures for each task, method and N: held-out loss (lines:
character error rate) over that of one worker at equal samples, and the effective speed-up at equal quality: minibatches
that one worker makes one after another, over those that the method makes so to come to the same quality, before
exchanges. The samples that this takes are found between the trainings, on straight lines of log loss over log samples;
beyond the longest training there is no figure.

    python benchmarks/time_to_quality.py [--tasks chars-sgd chars-adam lines] [--workers 8 16 32 64] [--seeds 1]
        [--minibatches 32768] [--longer 1 2 4] [--methods cold amplified grown] [--jobs 2] [--out out/time_to_quality]
        [--quick]

Finished trainings are kept in `--out`. The last line is a JSON object: `cells` (task, method, workers, `quality`,
`over_serial`, `effective_speedup`, `stages`), `worst_over_serial` and `effective_speedup` (median of the tasks) of
the method "grown" by N, and `plateau`: by how much one worker with half of the samples is worse, by task.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import _quick
import torch
from _quality_tasks import TASKS, Task, start
from _trainings import leave, rows_of

from paceline.forecast.sim import simulate_grown
from paceline.rules.schedule import Growth
from paceline.rules.schedule.growth import rate_factor

METHODS = ("cold", "amplified", "grown")
Row = dict[str, Any]


def name_of(task: str, method: str, workers: int, minibatches: int) -> str:
    """Of a training."""
    return f"{task}_{method}_{workers}_{minibatches}"


def train(task: Task, method: str, workers: int, minibatches: int, seed: int, out: Path) -> Row:
    """Make one training; what came out."""
    model, optimizer = start(task, seed)
    batches = task.batches(out, minibatches, seed)
    if method == "serial":
        stages = _serial(task, model, optimizer, batches, minibatches)
    else:
        amplify = 0.0 if method == "cold" else 0.5
        rule = f"{task.recipe}(period={task.period}, amplify={amplify})"
        growth = Growth() if method == "grown" else Growth(first=workers)
        found = simulate_grown(
            model,
            task.loss,
            optimizer,
            rule,
            batches,
            workers,
            growth=growth,
            rate=lambda done, k: rate_factor(k) * task.factor((done + k / 2) / minibatches),
            largest_gradient=task.largest_gradient,
        )
        model.load_state_dict(found.parameters, strict=False)
        stages = [[one.workers, one.minibatches, round(one.effective, 2)] for one in found.stages]
    return {"quality": task.judge(model, out), "stages": stages, "steps": sum(m // k for k, m, _ in stages)}


def _serial(task: Task, model: Any, optimizer: Any, batches: Any, minibatches: int) -> list[list[float]]:
    """One worker: the plain loop."""
    group = optimizer.param_groups[0]
    for step, batch in enumerate(batches):
        group["lr"] = task.rate * task.factor((step + 0.5) / minibatches)
        optimizer.zero_grad()
        task.loss(model, *batch).backward()
        if task.largest_gradient is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.largest_gradient)
        optimizer.step()
    return [[1, minibatches, 1.0]]


def steps_to(quality: float, trainings: list[tuple[int, int, float]]) -> float | None:
    """The steps to this quality, between trainings of (samples, steps, quality); None beyond the longest."""
    points = sorted(trainings)
    if points[0][2] <= quality:
        return float(points[0][1])
    for (_, low, worse), (_, high, better) in pairwise(points):
        if better <= quality < worse:
            share = math.log(worse / quality) / math.log(worse / better)
            return float(low * (high / low) ** share)
    return None


def cell(rows: dict[str, list[Row]], args: argparse.Namespace, task: str, method: str, workers: int) -> Row:
    """What a table has of a method."""

    def mean(method: str, workers: int, longer: float, key: str) -> float:
        named = rows[name_of(task, method, workers, round(args.minibatches * longer))]
        return statistics.fmean(row[key] for row in named)

    serial = mean("serial", 1, 1, "quality")
    trainings = [
        (round(args.minibatches * m), round(mean(method, workers, m, "steps")), mean(method, workers, m, "quality"))
        for m in args.longer
    ]
    steps = steps_to(serial, trainings)
    quality = mean(method, workers, 1, "quality")
    return {
        "task": task,
        "method": method,
        "workers": workers,
        "quality": round(quality, 4),
        "over_serial": round(quality / serial - 1, 4),
        "effective_speedup": None if steps is None else round(args.minibatches / steps, 2),
        "stages": rows[name_of(task, method, workers, args.minibatches)][0]["stages"],
    }


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minibatches", type=int, default=32_768)
    parser.add_argument("--longer", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=Path("out/time_to_quality"))
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    return _quick.parse(parser, given, tasks=["chars-sgd"], workers=[4], minibatches=256, longer=[1, 2])


def trained(args: argparse.Namespace) -> dict[str, list[Row]]:
    """All trainings, by name."""
    names = [name_of(task, "serial", 1, round(args.minibatches * m)) for task in args.tasks for m in (1, 0.5)]
    names += [
        name_of(task, method, workers, round(args.minibatches * m))
        for m in args.longer
        for task in args.tasks
        for workers in args.workers
        for method in args.methods
    ]
    wanted = [(name, seed) for seed in range(args.seeds) for name in names]
    found: dict[str, list[Row]] = {}
    for (name, _), row in zip(wanted, rows_of(args.out, wanted, args.jobs), strict=True):
        found.setdefault(name, []).append(row)
    return found


def by_workers(cells: list[Row], key: str, fold: Any) -> dict[str, float | None]:
    """A figure of `grown`, over the tasks; None where one has none."""
    found: dict[str, float | None] = {}
    for workers in sorted({one["workers"] for one in cells}):
        values = [one[key] for one in cells if one["method"] == "grown" and one["workers"] == workers]
        found[str(workers)] = None if None in values or not values else fold(values)
    return found


def main() -> None:
    """Train what is missing, and print the table."""
    args = parse()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        task, method, workers, minibatches = args.one[0].split("_")
        seed = int(args.one[1])
        leave(args.out, (args.one[0], seed), train(TASKS[task], method, int(workers), int(minibatches), seed, args.out))
        return
    rows = trained(args)
    cells = [
        cell(rows, args, task, method, workers)
        for task in args.tasks
        for workers in args.workers
        for method in args.methods
    ]
    for one in cells:
        sooner = "-" if one["effective_speedup"] is None else f"{one['effective_speedup']:.1f}"
        print(
            f"{one['task']:11} {one['method']:10} N = {one['workers']:3}  {one['quality']:.4f}"
            f"  {100 * one['over_serial']:+6.1f} %  {sooner:>5} times as fast"
        )
    plateau = {
        task: round(
            statistics.fmean(row["quality"] for row in rows[name_of(task, "serial", 1, args.minibatches // 2)])
            / statistics.fmean(row["quality"] for row in rows[name_of(task, "serial", 1, args.minibatches)])
            - 1,
            4,
        )
        for task in args.tasks
    }
    figures = {
        "worst_over_serial": by_workers(cells, "over_serial", max),
        "effective_speedup": by_workers(cells, "effective_speedup", statistics.median),
    }
    print(json.dumps({"cells": cells, **figures, "plateau": plateau}))


if __name__ == "__main__":
    main()
