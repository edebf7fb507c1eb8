# SPDX-License-Identifier: Apache-2.0
"""Is the bound of `auto(within="1%")` kept, and what is gained by it?

Stacked workers train the tasks of `_quality_tasks.py`, with the rate that is best for one worker. The network is such
that measured times would want blocks of `--target` minibatches: there exchanges take 2 % of the time. Methods:

    mild            blocks of 4, the setting with which a bound begins
    curve           `auto(within=..)` as a run decides it, by the curve of the held-out loss
    branches        the same, decided by branches from one state (`paceline_plugins.forecast.vectorised.within`)
    unbounded       blocks of `--target` from the beginning
    mild-grow       two workers, blocks of 4
    curve-grow      `auto(within=.., grow="auto")` up to all workers, blocks of 4, decided by the curve
    unbounded-grow  `grow="auto"` without a bound, blocks of 4

All see the same minibatches in the same order. "curve" and "branches" evaluate the average of the global model on a
small part of the held-out data every `--every` minibatches; the quality in the end is that on all of it. Time is that
of the steps and the exchanges of the workers, without evaluations; branches that are not kept run beside the others.

    python benchmarks/within.py [--tasks small-sgd chars-sgd] [--workers 16] [--seeds 3] [--bound 0.01] [--target 64]
        [--every 128] [--minibatches N] [--methods mild curve ..] [--jobs 1] [--out out/within] [--quick]

Finished trainings are kept in `--out`. The last line is a JSON object: `cells` (task, method, `quality`, `over_mild` of
each seed and their mean in `mean_over_mild`, `time_over_mild`, `spent`, `settings` and sentences of the first seed),
`worst_over_mild` by method, over tasks and seeds, and `kept`: by method, the share of trainings within the bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import _chars
import _quick
import torch
from _quality_tasks import TASKS, Batch, Task, start
from _trainings import leave, rows_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from paceline.rules.recipes import make_rule
from paceline.rules.schedule import Growth
from paceline.rules.schedule.growth import rate_factor
from paceline_plugins.forecast import WithinResult, simulate_grown, simulate_within

METHODS = ("mild", "curve", "branches", "unbounded", "mild-grow", "curve-grow", "unbounded-grow")
LEAST, SHARE, JUDGED = 4, 0.02, 1 << 14
UNBOUNDED = 0.5
"""The largest bound; what is decided with it does not matter."""
Row = dict[str, Any]


class HeldOut:
    """Evaluates a model on a small part of the held-out data.

    Args:
        task: has the model.
        model: whose parameters are replaced.
        folder: of the data.
    """

    def __init__(self, task: Task, model: nn.Module, folder: Path) -> None:
        places = _chars.windows(_chars.text(folder).validation)
        self._before, self._character = _chars.split(places[:: max(1, len(places) // JUDGED)])
        self._model = model

    @torch.no_grad()
    def __call__(self, parameters: dict[str, Tensor]) -> float:
        """The loss."""
        logits = functional_call(self._model, parameters, (self._before,))
        return float(nn.functional.cross_entropy(logits, self._character))


def rule_of(args: argparse.Namespace, method: str) -> str:
    """What the workers exchange."""
    kind, _, grows = method.partition("-")
    bound = args.bound if kind in ("curve", "branches") else UNBOUNDED
    first = args.target if method == "unbounded" else LEAST
    grow = ", grow='auto'" if kind == "curve" and grows else ""
    return f"auto(within={bound}, first={first}, longest={max(first, args.target)}{grow})"


def train_one(args: argparse.Namespace, name: str, seed: int) -> None:
    """Make the training of a name."""
    task_name, method, *_ = name.split("_")
    task, count = TASKS[task_name], minibatches_of(args, task_name)
    model, optimizer = start(task, seed)
    kind, _, grows = method.partition("-")
    batches = task.batches(args.out, count, seed)
    if method == "unbounded-grow":
        row = grow_freely(args, task, model, optimizer, batches, count)
        leave(args.out, (name, seed), row | {"quality": task.judge(model, args.out)})
        return
    decides = kind in ("curve", "branches") and not grows
    train = partial(
        simulate_within,
        target=args.target if decides else LEAST,
        every=args.every if kind != "mild" else 1 << 40,
        paired=kind == "branches",
        rate=lambda made: task.factor(made / count),
        largest_gradient=task.largest_gradient,
    )
    workers = 2 if method == "mild-grow" else args.workers
    held_out = HeldOut(task, model, args.out)
    found = train(model, task.loss, optimizer, rule_of(args, method), batches, workers, held_out)
    model.load_state_dict(found.parameters, strict=False)
    leave(args.out, (name, seed), told_of(found) | {"quality": task.judge(model, args.out)})


def grow_freely(
    args: argparse.Namespace, task: Task, model: nn.Module, optimizer: Optimizer, batches: Iterator[Batch], count: int
) -> Row:
    """Train with a number of workers that grows without a bound."""
    rule, growth = make_rule(f"auto(within={UNBOUNDED}, first={LEAST}, longest={LEAST})", {}), Growth()
    found = simulate_grown(
        model,
        task.loss,
        optimizer,
        rule,
        batches,
        args.workers,
        growth=growth,
        rate=lambda made, k: rate_factor(k, growth.rate_exponent) * task.factor(made / count),
        largest_gradient=task.largest_gradient,
    )
    model.load_state_dict(found.parameters, strict=False)
    begins = [0, *accumulate(stage.minibatches for stage in found.stages)]
    settings = [[began, LEAST, stage.workers] for began, stage in zip(begins, found.stages, strict=False)]
    return {
        "settings": settings,
        "steps": found.steps,
        "exchanges": found.steps // LEAST,
        "spent": 0.0,
        "told": [],
        "extra": 0,
    }


def told_of(found: WithinResult) -> Row:
    """What is kept of a training."""
    names = ("settings", "steps", "exchanges", "spent", "told", "extra")
    return {name: getattr(found, name) for name in names}


def minibatches_of(args: argparse.Namespace, task: str) -> int:
    """Of all workers."""
    return int(TASKS[task].minibatches if args.minibatches is None else args.minibatches)


def name_of(args: argparse.Namespace, task: str, method: str) -> str:
    """Of a training; its file has it."""
    return f"{task}_{method}_{args.workers}_{minibatches_of(args, task)}_{args.bound:g}_{args.target}_{args.every}"


def seconds(args: argparse.Namespace, row: Row) -> float:
    """In parts of a minibatch, by the network on which blocks of the target keep exchanges at their share."""
    exchange = SHARE / (1 - SHARE) * args.target
    return float(row["steps"] + exchange * row["exchanges"])


def cell_of(args: argparse.Namespace, rows: dict[tuple[str, str], list[Row]], task: str, method: str) -> Row:
    """What the table has of a method."""
    mild = rows[task, "mild-grow" if method.endswith("-grow") else "mild"]
    own = rows[task, method]
    over = [one["quality"] / other["quality"] - 1 for one, other in zip(own, mild, strict=True)]
    times = [seconds(args, one) / seconds(args, other) for one, other in zip(own, mild, strict=True)]
    return {
        "task": task,
        "method": method,
        "quality": round(statistics.fmean(row["quality"] for row in own), 4),
        "over_mild": [round(one, 5) for one in over],
        "mean_over_mild": round(statistics.fmean(over), 5),
        "time_over_mild": round(statistics.fmean(times), 3),
        "spent": [round(row["spent"], 5) for row in own],
        "settings": own[0]["settings"],
        "told": own[0]["told"],
    }


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["small-sgd", "chars-sgd"])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bound", type=float, default=0.01)
    parser.add_argument("--target", type=int, default=64)
    parser.add_argument("--every", type=int, default=128)
    parser.add_argument("--minibatches", type=int, help="in place of each task's own")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time; 1 makes them in this process")
    parser.add_argument("--out", type=Path, default=Path("out/within"))
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    tiny = {"tasks": ["small-sgd"], "workers": 4, "seeds": 1, "minibatches": 2048, "target": 8}
    return _quick.parse(parser, given, **tiny)


def main() -> None:
    """Train what is missing, and print the table."""
    args = parse()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        train_one(args, args.one[0], int(args.one[1]))
        return
    wanted = list(dict.fromkeys([*args.methods, *("mild-grow" if "grow" in one else "mild" for one in args.methods)]))
    grid = [(task, method) for task in args.tasks for method in wanted]
    here = partial(train_one, args) if args.jobs == 1 else None
    jobs = [(name_of(args, *cell), seed) for cell in grid for seed in range(args.seeds)]
    made = rows_of(args.out, jobs, args.jobs, here)
    rows = {cell: made[k * args.seeds : (k + 1) * args.seeds] for k, cell in enumerate(grid)}
    cells = [cell_of(args, rows, *cell) for cell in grid]
    for cell in cells:
        shown = ", ".join(f"{100 * one:+.2f}" for one in cell["over_mild"])
        print(
            f"{cell['task']:10} {cell['method']:15} {cell['quality']:.4f}  over mild {shown} %  "
            f"time {cell['time_over_mild']:.2f}  spent {', '.join(f'{100 * one:.2f}' for one in cell['spent'])} %"
        )
    by_method = {one: [over for c in cells if c["method"] == one for over in c["over_mild"]] for one in args.methods}
    worst = {one: max(over) for one, over in by_method.items()}
    kept = {one: round(statistics.fmean(each <= args.bound for each in over), 3) for one, over in by_method.items()}
    print(json.dumps({"cells": cells, "worst_over_mild": worst, "kept": kept}))


if __name__ == "__main__":
    main()
