# SPDX-License-Identifier: Apache-2.0
"""Every recipe on one small real task: the loss of one worker and of four virtual ones, for the recipes' pages.

The task is that of `blocks.py`, smaller: guess the next character of Python's library from the last twelve. All
trainings see the same minibatches in the same order; four workers take the next four in each step.

::

    python benchmarks/quality/recipes.py --out curves.json  # some minutes on one core; goes on where it stopped
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from _chars import Perceptron, batches, judged, loss_of, text
from torch.optim.lr_scheduler import LambdaLR

import paceline
from paceline.forecast.sim import Clock, uniform
from paceline.rules.recipes import RECIPES

WORKERS = 4
SIZE, HIDDEN, EMBEDDING = 16, 64, 16
POINTS = 48
"""Of a curve: each is the mean training loss of so much of the training."""
HELD_OUT = 60_000
"""Characters of the validation part."""


@dataclass(frozen=True)
class Optimizer:
    """What one worker trains with, and its rate."""

    lr: float
    make: Callable[..., torch.optim.Optimizer]


OPTIMIZERS = {
    "SGD": Optimizer(0.25, torch.optim.SGD),
    "SGD with momentum 0.9": Optimizer(0.025, functools.partial(torch.optim.SGD, momentum=0.9)),
    "Adam": Optimizer(0.002, torch.optim.Adam),
}
TAKES = {
    "one_bit_adam": "Adam",
    "bmuf_adam": "Adam",
    "diloco": "Adam",
    "streaming_diloco": "Adam",
    "momentum_tuned": "SGD with momentum 0.9",
}
"""Recipes that are meant for another optimizer than plain SGD."""
N_FOLD = ("sync", "one_bit", "power", "top_k", "one_bit_adam", "ssp")
"""Recipes that step as one worker with the N-fold minibatch, and so have N times its rate."""
SETTINGS = {"one_bit_adam": {"warmup": 64}}
"""Where the default is made for longer trainings: 1,000 steps of warm-up are more than all of this one."""


@dataclass(frozen=True)
class Training:
    """A training: None as the rule is one worker alone."""

    rule: str | None
    optimizer: str
    scale: int
    minibatches: int
    seed: int


def plan(minibatches: int, seed: int) -> dict[str, Training]:
    """All trainings of a seed, by name."""
    alone = {name: Training(None, name, 1, minibatches, seed) for name in OPTIMIZERS}
    of = {}
    for name in RECIPES:
        given = ", ".join(f"{key}={value}" for key, value in SETTINGS.get(name, {}).items())
        scale = WORKERS if name in N_FOLD else 1
        of[name] = Training(f"{name}({given})", TAKES.get(name, "SGD"), scale, minibatches, seed)
    return alone | of


def share_of_rate(step: int, steps: int) -> float:
    """Rises over a sixteenth, stays, and falls by 1000 over the last 60 %."""
    done = step / steps
    return min(1.0, 16 * (done + 1 / steps)) * math.exp(-math.log(1000) * max(0.0, done - 0.4) / 0.6)


def train(training: Training, corpus_folder: Path) -> tuple[list[float], float]:
    """The curve, POINTS mean training losses, and the held-out loss of the global model at the end."""
    corpus = text(corpus_folder)
    workers = WORKERS if training.rule else 1
    steps = training.minibatches // workers
    data = list(batches(corpus.train, workers, steps, SIZE, training.seed))
    losses = torch.zeros(steps, workers)

    def worker() -> float:
        torch.manual_seed(training.seed)
        model = Perceptron(HIDDEN, EMBEDDING)
        chosen = OPTIMIZERS[training.optimizer]
        optimizer = chosen.make(model.parameters(), lr=chosen.lr * training.scale)
        schedule = LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
        run = paceline.attach(model, optimizer, training.rule or "sync")
        for step, (before, character) in enumerate(data):
            optimizer.zero_grad()
            loss = loss_of(model, before[run.world.rank], character[run.world.rank])
            loss.backward()
            optimizer.step()
            schedule.step()
            losses[step, run.world.rank] = loss.detach()
        run.close()
        last = dict(model.named_parameters())
        return judged(model, last, corpus.validation[:HELD_OUT]) if run.world.rank == 0 else 0.0

    rule = paceline.rule_from_text(training.rule or "sync")
    clock = Clock(compute=uniform(0.5, 1.5), seed=training.seed) if not rule.schedule.workers_meet else None
    held_out = paceline.simulate(worker, workers, clock=clock)[0]
    assert held_out is not None
    return losses.flatten().view(POINTS, -1).mean(1).tolist(), held_out


def row_of(name: str, minibatches: int, seeds: int, folder: Path) -> dict[str, object]:
    """The curve, a mean over the seeds, and the results of one line of the table."""
    plans = [plan(minibatches, seed)[name] for seed in range(seeds)]
    outs = [train(training, folder) for training in plans]
    curve = [round(statistics.mean(points), 4) for points in zip(*(curve for curve, _ in outs), strict=True)]
    first = plans[0]
    return {
        "rule": first.rule,
        "optimizer": first.optimizer,
        "lr": OPTIMIZERS[first.optimizer].lr * first.scale,
        "curve": curve,
        "held_out": [round(held_out, 4) for _, held_out in outs],
    }


def study(setting: dict[str, int], names: list[str], out: Path) -> None:
    """Make the trainings that `out` does not hold yet, and write each when it is there."""
    done = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"setting": setting, "trainings": {}}
    if done["setting"] != setting:
        raise SystemExit(
            f"{out} holds trainings of another setting: {done['setting']}; remove it, or name another file"
        )
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name in done["trainings"]:
                continue
            done["trainings"][name] = row_of(name, setting["minibatches"], setting["seeds"], Path(folder))
            print(name, done["trainings"][name]["held_out"], flush=True)
            lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in done["trainings"].items())
            out.write_text(f'{{"setting": {json.dumps(setting)}, "trainings": {{\n{lines}\n}}}}\n', encoding="utf-8")


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatches", type=int, default=1536, help="of all workers together")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names of recipes or optimizers")
    parser.add_argument("--out", type=Path, required=True)
    arguments = _quick.parse(parser, minibatches=WORKERS * POINTS // 2, seeds=1)
    if not arguments.quick and arguments.minibatches % (WORKERS * POINTS):
        parser.error(f"--minibatches must be a multiple of {WORKERS * POINTS}, got {arguments.minibatches}")
    torch.set_num_threads(1)
    setting = {"workers": WORKERS, "minibatches": arguments.minibatches, "batch": SIZE, "seeds": arguments.seeds}
    study(setting, arguments.only or list(plan(0, 0)), arguments.out)


if __name__ == "__main__":
    main()
