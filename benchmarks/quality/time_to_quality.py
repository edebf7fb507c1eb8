# SPDX-License-Identifier: Apache-2.0
"""How good, and how soon: many workers with nothing tuned for their number, beside one worker.

Every method has the rate that is best for one worker, times k^0.29 where k workers train (2503.09799), and the same
minibatches in the same order. Methods, with settings in their names, are those of `_quality_methods.py`. `cold` is
today's recipe with N workers from the first step, as `auto` trains in blocks; `amplified` the same with `amplify=0.5`;
`grown` amplified with a number of workers that grows to N (`paceline.rules.schedule.growth`). `diloco` has DiLoCo's
published constants, `averaging` takes the mean of the models. `sync-rate=0.5` and its like are synchronous training
with the batch and the steps of `grown`, at one worker's rate times k^0.5; of several, the best in each cell is taken.

The tasks `small-sgd`, `small-adam`, `small-lines` and `small-speech` have a size at their plateau: one worker with half
of the samples is at most 2 % worse there (`plateau`), and so have `frames-sgd`, `frames-adam` and, in errors,
`chat-sgd` (an LSTM that answers) and `blstm-adam`. `pictures-sgd` (AlexNet's shape) has not. `small-speech`, frames and
the BLSTM need espeak-ng; the first is left out without it.
Methods are compared at equal samples. `--timed` methods are also trained with more samples until they reach one
worker's quality, or with fewer where they have: the effective speed-up is the time of one worker over the time that the
method takes to the same quality. Exchanges are included, by the planner, for a model of `--parameters` with a minibatch
of `--step-s` seconds. Times between two trainings lie on a straight line of log quality over log time; beyond the
largest of `--sizes` there is no figure. Less is trained for the reverse, `speed_to_its_quality`: the time in which one
worker reaches the quality that the method has in the end, by its trainings of `--alone` shares of the samples, over the
method's time; none where the quality is worse than that of the smallest share.

    python benchmarks/quality/time_to_quality.py [--tasks small-sgd small-adam small-lines small-speech]
        [--workers 8 16 32 64] [--seeds 1] [--minibatches 65536] [--sizes .5 1 2 4]
        [--methods cold amplified grown diloco averaging sync-rate=0.5]
        [--timed grown] [--alone .125 .25 .5] [--gbit 1 10 inf] [--step-s 0.25] [--parameters 1000000] [--jobs 1]
        [--out out/time_to_quality] [--quick]

Finished trainings are kept in `--out`. The last line is a JSON object: `cells` (task, method, workers, `quality`,
`over_serial`, `error_over_serial` where the task counts errors, too, by network `seconds_over_serial` at equal samples,
`effective_speedup` and `speed_to_its_quality`, and `stages`); of the method "grown" by N `worst_over_serial`,
`effective_speedup` (median of the tasks, on the first network; on all of them in `effective_speedup_by_gbit`),
`worker_seconds_over_serial` (all N workers' time to that quality, with that of those that wait, over one worker's) and
`behind_sync` (the most by which it is worse than the best synchronous training); `methods`, by the name of each that is
not synchronous the same `worst_over_serial`, `effective_speedup` and `behind_sync`, each by N; `oracle`, the worst of
the tasks over one worker where the best of all "grown" methods that were given is taken in each cell; `plateau` and
`plateau_error`: by how much one worker with half of the samples is worse, by task; `serial`, of one worker by task, and
of each cell `each`: what each seed had, by the size of the training; `minibatches` by task, and the `command`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from _quality_methods import Method, train
from _quality_tasks import TASKS
from _quality_times import Clock, time_to
from _speech_voices import missing
from _trainings import file_of, leave, rows_of

OURS = "grown"
SILENT = ("small-sgd", "small-adam", "small-lines")
"""Tasks at their plateau that need no espeak-ng."""
OWN_QUICK = {"chat-sgd", "pictures-sgd"}
"""Tasks that have a quick form; another's is that of a task of `SILENT`."""
Row = dict[str, Any]
Cell = tuple[str, str, int, float]
"""Task, method, workers, and how many times the task's minibatches."""


class Trainings:
    """All trainings, made where they are missing.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._rows: dict[Cell, list[Row]] = {}
        grid = [(task, method, workers) for task in args.tasks for workers in args.workers for method in args.methods]
        self.cells = [(*cell, 1.0) for cell in grid]
        serial = [(task, "serial", 1, share) for task in args.tasks for share in {1.0, 0.5, *args.alone}]
        self._make([*serial, *self.cells])
        timed = [cell for cell in self.cells if cell[1] in args.timed]
        reached = {cell: self.over_serial(cell) <= 0 for cell in timed}
        for longer in sorted(m for m in args.sizes if m > 1):
            self._make([(*cell[:3], longer) for cell in timed if not reached[cell]])
            reached |= {cell: self.over_serial((*cell[:3], longer)) <= 0 for cell in timed if not reached[cell]}
        shorter = [m for m in args.sizes if m < 1]
        self._make([(*cell[:3], m) for m in shorter for cell in timed if self.over_serial(cell) <= 0])

    def _make(self, cells: list[Cell]) -> None:
        together = [cell for cell in cells if Method.of(cell[1]).follows]
        if together:  # they take the stages of these
            self._make([(task, OURS, workers, longer) for task, _, workers, longer in together])
        missing = [cell for cell in dict.fromkeys(cells) if cell not in self._rows]
        grid = [(cell, seed) for seed in range(self.args.seeds) for cell in missing]
        wanted = [(name_of(self.args, cell), seed) for cell, seed in grid]
        here = partial(train_one, self.args) if self.args.jobs == 1 else None
        rows = rows_of(self.args.out, wanted, self.args.jobs, here)
        for (cell, _), row in zip(grid, rows, strict=True):
            self._rows.setdefault(cell, []).append(row)

    def quality(self, cell: Cell) -> float:
        """Mean over the seeds; infinite if one of them diverged."""
        return statistics.fmean(math.inf if row["quality"] is None else row["quality"] for row in self._rows[cell])

    def over_serial(self, cell: Cell) -> float:
        """By how much it is worse than one worker with the task's samples."""
        return self.quality(cell) / self.quality((cell[0], "serial", 1, 1.0)) - 1

    def error_over_serial(self, cell: Cell) -> float | None:
        """The same of the share of errors; None where the task has none."""
        if TASKS[cell[0]].error is None:
            return None
        here, alone = (
            statistics.fmean(row["error"] for row in self._rows[one]) for one in (cell, (cell[0], "serial", 1, 1.0))
        )
        return here / alone - 1

    def spread(self, cell: Cell) -> float:
        """Standard deviation over the seeds; 0 with one, and no number if one of them diverged."""
        found = [row["quality"] for row in self._rows[cell]]
        if None in found:
            return math.nan
        return statistics.stdev(found) if len(found) > 1 else 0.0

    def seconds(self, cell: Cell, gbit: float) -> float:
        """Mean over the seeds, on a network."""
        clock = Clock(self.args.step_s, self.args.parameters, gbit)
        return statistics.fmean(clock.seconds(TASKS[cell[0]], cell[1], row["stages"]) for row in self._rows[cell])

    def stages(self, cell: Cell) -> Any:
        """Of the first seed."""
        return self._rows[cell][0]["stages"]

    def each(self, task: str, method: str, workers: int) -> dict[str, Row]:
        """What each seed has, in its order, by how many times the task's minibatches there were."""
        made = sorted(cell[3] for cell in self._rows if cell[:3] == (task, method, workers))
        rows = {m: self._rows[task, method, workers, m] for m in made}
        keys = ("quality", "error", "stages")
        return {f"{m:g}": {key: [row[key] for row in of] for key in keys if key in of[0]} for m, of in rows.items()}

    def speedup(self, cell: Cell, gbit: float) -> float | None:
        """One worker's time over that to its quality."""
        task, method, workers, _ = cell
        if method not in self.args.timed:
            return None
        serial = (task, "serial", 1, 1.0)
        cells = [cell for m in self.args.sizes if (cell := (task, method, workers, m)) in self._rows]
        points = [(one[3], self.seconds(one, gbit), self.quality(one)) for one in cells]
        seconds = time_to(self.quality(serial), points)
        return None if seconds is None else self.seconds(serial, gbit) / seconds

    def speed_to_its_quality(self, cell: Cell, gbit: float) -> float | None:
        """One worker's time to this quality, and no more than the task's samples take it, over its own time."""
        alone = [(cell[0], "serial", 1, share) for share in {1.0, *self.args.alone}]
        points = [(one[3], self.seconds(one, gbit), self.quality(one)) for one in alone]
        if self.quality(cell) > min(points)[2]:
            return None
        seconds = time_to(self.quality(cell), points)
        return (max(points)[1] if seconds is None else seconds) / self.seconds(cell, gbit)


def minibatches_of(args: argparse.Namespace, task: str, longer: float) -> int:
    """Of all workers."""
    return round(longer * (TASKS[task].minibatches if args.minibatches is None else args.minibatches))


def name_of(args: argparse.Namespace, cell: Cell) -> str:
    """Of a training; its file has it."""
    task, method, workers, longer = cell
    return f"{task}_{method}_{workers}_{minibatches_of(args, task, longer)}"


def train_one(args: argparse.Namespace, name: str, seed: int) -> None:
    """Make the training of a name."""
    task, method, workers, minibatches = name.split("_")
    ours = file_of(args.out, (f"{task}_{OURS}_{workers}_{minibatches}", seed))
    stages = json.loads(ours.read_text(encoding="utf-8"))["stages"] if Method.of(method).follows else []
    made = train(TASKS[task], method, int(workers), int(minibatches), seed, args.out, stages)
    leave(args.out, (name, seed), made)


def rounded(value: float | None, digits: int = 4) -> float | None:
    """As JSON has it; None where there is none, or where it diverged."""
    return None if value is None or not math.isfinite(value) else round(value, digits)


def row_of(made: Trainings, cell: Cell) -> Row:
    """What a table has of a method."""
    task, method, workers, _ = cell
    serial = (task, "serial", 1, 1.0)
    found: Row = {"task": task, "method": method, "workers": workers}
    figures = {"quality": made.quality, "spread": made.spread, "over_serial": made.over_serial}
    found |= {name: rounded(figure(cell)) for name, figure in figures.items()}
    if TASKS[task].error is not None:
        found["error_over_serial"] = rounded(made.error_over_serial(cell))
    speedups = {f"{gbit:g}": made.speedup(cell, gbit) for gbit in made.args.gbit}
    found["seconds_over_serial"] = {
        f"{gbit:g}": round(made.seconds(cell, gbit) / made.seconds(serial, gbit), 4) for gbit in made.args.gbit
    }
    found["effective_speedup"] = {gbit: rounded(one, 2) for gbit, one in speedups.items()}
    its = {f"{gbit:g}": made.speed_to_its_quality(cell, gbit) for gbit in made.args.gbit}
    found["speed_to_its_quality"] = {gbit: rounded(one, 2) for gbit, one in its.items()}
    return {**found, "stages": made.stages(cell), "each": made.each(task, method, workers)}


# ---- Figures by N


def by_workers(rows: list[Row], figure: Callable[[list[Row]], float | None]) -> dict[str, float | None]:
    """A figure of the rows of each N."""
    counts = sorted({row["workers"] for row in rows})
    found = {str(count): figure([row for row in rows if row["workers"] == count]) for count in counts}
    return {count: rounded(one) for count, one in found.items()}


def rows_by(method: str, rows: Iterable[Row]) -> list[Row]:
    """Those of a method."""
    return [row for row in rows if row["method"] == method]


def median_speedup(rows: list[Row], gbit: str, method: str = OURS) -> float | None:
    """Of the tasks; None where one has none."""
    found = [row["effective_speedup"][gbit] for row in rows_by(method, rows)]
    return None if None in found or not found else statistics.median(found)


def best_in_each(rows: list[Row], kind: str) -> dict[str, Row]:
    """By task, the best method of a kind."""
    found: dict[str, Row] = {}
    for row in rows:
        if Method.of(row["method"]).kind == kind and row["quality"] is not None:
            found[row["task"]] = min(found.get(row["task"], row), row, key=lambda one: one["quality"])
    return found


def behind_sync(rows: list[Row], method: str = OURS) -> float | None:
    """The most by which a method is worse than the best synchronous training of its task and N."""
    found = []
    for workers in {row["workers"] for row in rows}:
        here = [row for row in rows if row["workers"] == workers]
        sync = best_in_each(here, "sync")
        mine = [row for row in rows_by(method, here) if row["task"] in sync]
        found += [(row["quality"] or math.inf) / sync[row["task"]]["quality"] - 1 for row in mine]
    return rounded(max(found, default=None))


def worst(rows: Iterable[Row]) -> float | None:
    """Over one worker; None where one diverged."""
    found = [row["over_serial"] for row in rows]
    return None if None in found else max(found, default=None)


def of_method(rows: list[Row], method: str, gbit: str) -> Row:
    """Its figures by N."""
    return {
        "worst_over_serial": by_workers(rows, lambda of: worst(rows_by(method, of))),
        "effective_speedup": by_workers(rows, partial(median_speedup, gbit=gbit, method=method)),
        "behind_sync": by_workers(rows, partial(behind_sync, method=method)),
    }


def figures_of(made: Trainings, rows: list[Row]) -> Row:
    """Of the last line, what is about the default method."""
    networks = [f"{gbit:g}" for gbit in made.args.gbit]
    speedups = {gbit: by_workers(rows, partial(median_speedup, gbit=gbit)) for gbit in networks}
    first = speedups[networks[0]]
    ours = [name for name in made.args.methods if Method.of(name).kind not in ("serial", "sync")]
    halves = [(task, "serial", 1, 0.5) for task in made.args.tasks]
    return {
        "worst_over_serial": by_workers(rows, lambda of: worst(rows_by(OURS, of))),
        "effective_speedup": first,
        "effective_speedup_by_gbit": speedups,
        "worker_seconds_over_serial": {n: one and rounded(int(n) / one, 2) for n, one in first.items()},
        "behind_sync": behind_sync(rows),
        "methods": {name: of_method(rows, name, networks[0]) for name in ours},
        "oracle": by_workers(rows, lambda of: worst(best_in_each(of, OURS).values())),
        "plateau": {cell[0]: rounded(made.over_serial(cell)) for cell in halves},
        "plateau_error": {cell[0]: rounded(made.error_over_serial(cell)) for cell in halves if TASKS[cell[0]].error},
        "serial": {task: made.each(task, "serial", 1) for task in made.args.tasks},
        "minibatches": {task: minibatches_of(made.args, task, 1.0) for task in made.args.tasks},
        "command": " ".join(sys.argv),
    }


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    spoken = [] if missing() else ["small-speech"]
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=[*SILENT, *spoken])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minibatches", type=int, help="in place of each task's own")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 1, 2, 4])
    methods = ["cold", "amplified", "grown", "diloco", "averaging", "sync-rate=0.5", "sync-rate=0.75"]
    parser.add_argument("--methods", nargs="+", default=methods)
    parser.add_argument("--timed", nargs="+", default=["grown"], help="methods that are trained with other sizes, too")
    parser.add_argument("--alone", type=float, nargs="+", default=[0.5], help="shares that one worker trains on, too")
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10, math.inf])
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time; 1 makes them in this process")
    parser.add_argument("--out", type=Path, default=Path("out/time_to_quality"))
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    args = _quick.parse(parser, given, workers=[4], minibatches=64, seeds=1, alone=[0.5])
    if args.quick and not OWN_QUICK.issuperset(args.tasks):
        args.minibatches *= 2  # which these need
        args.tasks = ["small-sgd" if "asgd" in args.methods else "small-lines"]  # asgd is made for SGD alone
    return args


def main() -> None:
    """Train what is missing, and print the table."""
    args = parse()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        train_one(args, args.one[0], int(args.one[1]))
        return
    made = Trainings(args)
    rows = [row_of(made, cell) for cell in made.cells]
    for row in rows:
        sooner, over = next(iter(row["effective_speedup"].values())), row["over_serial"]
        print(
            f"{row['task']:11} {row['method']:27} N = {row['workers']:3}  "
            f"{'diverged' if over is None else f'{100 * over:+6.1f} %':9} "
            f"{'' if sooner is None else f'{sooner:5.1f} times as fast'}"
        )
    print(json.dumps({"cells": rows, **figures_of(made, rows)}))


if __name__ == "__main__":
    main()
