# SPDX-License-Identifier: Apache-2.0
"""What settings of block rules are worth on the characters: an average of the models, restarts of the momentum.

Every training has the recipe of `_quality_tasks.py` for its task, N stacked workers and one more setting. The rate is
that of one worker times N^0.29 (2503.09799). It falls at the end as the task has it (`falling`), or stays at its height
(`flat`), as in a training that may stop at any time; `falling*2` begins twice as high. Beside each held-out loss stands
how much it is above that of the recipe as it is. With `--workers 1` it is the plain program.

    python benchmarks/quality/block_options.py [--tasks chars-sgd chars-adam] [--workers 16] [--minibatches 16384] \
        [--seeds 3] [--rates falling flat] [--settings "" "ema=0.9" ..] [--jobs 1] [--out out/block_options] [--quick]

Finished trainings are kept in `--out`. The last line is a JSON object: `cells` (task, rate, setting, `loss`, `spread`,
`over_recipe`, all over the seeds).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from _quality_tasks import TASKS, start
from _trainings import leave, rows_of

from paceline.rules.schedule.growth import rate_factor
from paceline_plugins.forecast import simulate_stacked

SETTINGS = ["", "ema=0.5", "ema=0.8", "ema=0.9", "ema=0.95", "restart=8", "restart=16", "restart=32"]
Row = dict[str, Any]


def train(name: str, seed: int, workers: int, minibatches: int, folder: Path) -> Row:
    """Make the training `name`; its held-out loss."""
    task_name, rate, setting = name.split("_", 2)
    task = TASKS[task_name]
    kind, _, height = rate.partition("*")
    factor = task.factor if kind == "falling" else lambda share: 1.0
    model, optimizer = start(task, seed)
    batches = _together(task.batches(folder, minibatches, seed), workers)
    more = f", {setting}" if setting else ""
    found = simulate_stacked(
        model,
        task.loss,
        optimizer,
        f"{task.recipe}(period={task.period}{more})",
        batches,
        rate=lambda step: float(height or 1) * rate_factor(workers) * factor((step + 0.5) * workers / minibatches),
        largest_gradient=task.largest_gradient,
    )
    model.load_state_dict(found.parameters, strict=False)
    return {"loss": task.judge(model, folder)}


def _together(batches: Any, workers: int) -> Any:
    """The minibatches of all workers, each tensor of shape (N, ..)."""
    for row in zip(*[iter(batches)] * workers, strict=False):
        yield tuple(torch.stack(column) for column in zip(*row, strict=True))


def cell(rows: dict[str, list[Row]], task: str, rate: str, setting: str) -> Row:
    """What the table has of a setting."""
    losses = [row["loss"] for row in rows[f"{task}_{rate}_{setting}"]]
    plain = statistics.fmean(row["loss"] for row in rows[f"{task}_{rate}_"])
    loss = statistics.fmean(losses)
    return {
        "task": task,
        "rate": rate,
        "setting": setting,
        "loss": round(loss, 4),
        "spread": round(statistics.stdev(losses), 4) if len(losses) > 1 else None,
        "over_recipe": round(loss / plain - 1, 4),
    }


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["chars-sgd", "chars-adam"])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--minibatches", type=int, default=16_384, help="of all workers together")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", default=["falling", "flat"], help='"falling", "flat", "falling*2"')
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=Path("out/block_options"))
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    few = ["", "ema=0.5", "restart=2"]
    return _quick.parse(parser, given, tasks=["chars-sgd"], workers=4, minibatches=64, seeds=1, settings=few)


def main() -> None:
    """Train what is missing, and print the table."""
    args = parse()
    torch.set_num_threads(1)
    folder = args.out / f"{args.workers}_{args.minibatches}"
    folder.mkdir(parents=True, exist_ok=True)
    if args.one:
        name, seed = args.one[0], int(args.one[1])
        leave(folder, (name, seed), train(name, seed, args.workers, args.minibatches, args.out))
        return
    settings = list(dict.fromkeys(["", *args.settings]))
    names = [f"{task}_{rate}_{setting}" for task in args.tasks for rate in args.rates for setting in settings]
    wanted = [(name, seed) for seed in range(args.seeds) for name in names]
    rows: dict[str, list[Row]] = {}
    for (name, _), row in zip(wanted, rows_of(folder, wanted, args.jobs), strict=True):
        rows.setdefault(name, []).append(row)
    cells = [cell(rows, task, rate, setting) for task in args.tasks for rate in args.rates for setting in settings]
    for one in cells:
        spread = "" if one["spread"] is None else f" +- {one['spread']:.4f}"
        print(
            f"{one['task']:11} {one['rate']:8} {one['setting'] or 'the recipe':12} {one['loss']:.4f}{spread}"
            f"  {100 * one['over_recipe']:+.2f} %"
        )
    print(json.dumps({"cells": cells}))


if __name__ == "__main__":
    main()
