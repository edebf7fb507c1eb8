# SPDX-License-Identifier: Apache-2.0
"""The loss of blocks that end by time over that of even blocks, at equal samples, among virtual workers.

    python records/2026-11-29_uneven/quality.py [--minibatches 4096] [--seeds 0,1,2] [--tasks SGD,Adam,CTC]
        [--keep FILE]

Tasks, each under a cosine: to guess the next character of Python's library from the last twelve, by SGD and by Adam; to
read rows of four printed letters, by Adam with CTC. Ways:

- `even`: all make equally many minibatches.
- `samples`: blocks that end by time, in which each minibatch counts alike (paceline's).
- `workers`: the displacement of each worker counts alike.
- `normalised`: FedNova's weights (arXiv 2007.07481): tau sum_i p_i d_i / n_i, p_i = n_i / sum n, tau = sum_i p_i n_i.
- `asgd`: no blocks.

The last line is a JSON object: `loss_over`, by way, task and speeds: the mean loss of `samples` over that of the way,
less 1, None if the way diverged; `losses` (task, speeds, way, seed, loss, minibatches of each worker); one worker
stands under the way "one".
With --keep rows are taken from the file, and added to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import runpy
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "char_lm"))

import paceline
from data import load_corpus
from paceline.rules.outer import gain
from paceline.rules.schedule import uneven
from paceline.update.engine.blocks import fragment

PICTURES = Path(__file__).resolve().parents[2] / "benchmarks/quality/_everyday/data.py"
CONTEXT, BATCH, WIDTH, LETTERS, SIDE, PERIOD = 12, 16, 96, 4, 16, 8
SPEEDS = {
    "1 x 3, 1/5": [1, 1, 1, 0.2],
    "1, .8, .5, .2": [1, 0.8, 0.5, 0.2],
    "16, 1 to 1/5": [1] * 6 + [0.5] * 6 + [0.2] * 4,
}
RULES = {"SGD": "bmuf(period=8{})", "Adam": "bmuf_adam(period=8{})", "CTC": "bmuf_adam(period=8{})"}
WAYS = {"even": "", "samples": ", even=False", "workers": ", even=False", "normalised": ", even=False"}


@dataclass
class Task:
    """A model, its optimizer, and tensors whose rows are samples."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: tuple[Tensor, ...]
    held: tuple[Tensor, ...]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.model(x)
        if scores.dim() == 2:
            return F.cross_entropy(scores, y)
        times, lengths = torch.full((len(scores),), scores.shape[2]), torch.full((len(scores),), LETTERS)
        likely = torch.log_softmax(scores, 1).permute(2, 0, 1)
        return F.ctc_loss(likely, y, times, lengths, zero_infinity=True)


@cache
def letters(samples: int) -> dict[str, Tensor]:
    """Rows of LETTERS pictures: their columns (rows, SIDE, LETTERS * SIDE), and what they show, from 1."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, EVERYDAY_DATA=folder):
        drawn = runpy.run_path(str(PICTURES))["letters"](samples * LETTERS)
    x = {name: drawn[name].reshape(-1, LETTERS, SIDE, SIDE).transpose(0, 2, 1, 3) for name in ("x", "held_x")}
    found = {name: one.reshape(len(one), SIDE, -1) for name, one in x.items()}
    found |= {name: drawn[name].reshape(-1, LETTERS) + 1 for name in ("y", "held_y")}
    return {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in found.items()}


def task_of(kind: str, seed: int, samples: int) -> Task:
    torch.manual_seed(seed)
    if kind == "CTC":
        rows = letters(samples)
        layers = [nn.Conv1d(SIDE, 64, 9, 2, 4), nn.ReLU(), nn.Conv1d(64, 96, 7, 2, 3), nn.ReLU(), nn.Conv1d(96, 63, 1)]
        model = nn.Sequential(*layers)
        return Task(
            model, torch.optim.Adam(model.parameters(), 3e-3), *((rows[k + "x"], rows[k + "y"]) for k in ("", "held_"))
        )
    corpus = load_corpus()
    places = corpus.train.unfold(0, CONTEXT + 1, 1)
    chosen = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:samples]]
    held, symbols = corpus.validation.unfold(0, CONTEXT + 1, 1)[::7][:20000], int(corpus.train.max()) + 1
    model = nn.Sequential(nn.Embedding(symbols, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, WIDTH), nn.ReLU())
    model.append(nn.Linear(WIDTH, symbols))
    sgd = kind == "SGD"
    optimizer = torch.optim.SGD(model.parameters(), 0.3) if sgd else torch.optim.Adam(model.parameters(), 3e-3)
    return Task(model, optimizer, *((one[:, :-1].int(), one[:, -1].long()) for one in (chosen, held)))


def train(kind: str, rule: str, seed: int, minibatches: int) -> tuple[float, int]:
    """One worker's."""
    task = task_of(kind, seed, minibatches * BATCH)
    with paceline.attach(task.model, task.optimizer, rule) as run:
        share = run.share(DataLoader(TensorDataset(*task.train), BATCH, shuffle=True))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(task.optimizer, len(share))
        for rows in share:
            task.optimizer.zero_grad()
            task.loss(*rows).backward()
            task.optimizer.step()
            schedule.step()
        made = run.minibatches
    with torch.no_grad():
        return task.loss(*task.held).item(), made


@contextlib.contextmanager
def weighed(way: str, seconds: list[float]) -> Iterator[None]:
    """Context in which the mean of blocks is that of the way."""
    header, step = fragment.BlockUpdate._header, gain.eta_zeta
    made = uneven.periods(seconds, PERIOD)
    longer = sum(n * n for n in made) / sum(made) / PERIOD if way == "normalised" else 1.0

    def alike(update: Any, one: Any) -> Any:
        given = replace(one, minibatches=update.numbers.rule.schedule.period if one.minibatches else 0)
        return replace(header(update, given), minibatches=one.minibatches)

    def scaled(*numbers: Any) -> tuple[float, float]:
        eta, zeta = step(*numbers)
        return eta, longer * zeta

    if way not in ("workers", "normalised"):
        yield
        return
    with mock.patch.object(fragment.BlockUpdate, "_header", alike), mock.patch.object(gain, "eta_zeta", scaled):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatches", type=int, default=4096, help="of all workers")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tasks", default=",".join(RULES))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.minibatches, options.seeds = 96, "0"
    rows: list[list[Any]] = []
    if options.keep is not None and options.keep.exists():
        rows = [json.loads(line) for line in options.keep.read_text().splitlines()]
    mixes, kinds = dict(list(SPEEDS.items())[: 1 if options.quick else None]), options.tasks.split(",")
    for seed in map(int, options.seeds.split(",")):
        for kind in kinds:
            cells = [
                ("one", [1.0], "one"),
                *((name, one, way) for name, one in mixes.items() for way in (*WAYS, "asgd")),
            ]
            for name, speeds, way in cells:
                if any(row[:4] == [kind, name, way, seed] for row in rows):
                    continue
                rule, seconds = RULES[kind].format(WAYS.get(way, "")), [1 / one for one in speeds]
                body = lambda kind=kind, rule=rule: train(kind, rule, seed, options.minibatches)  # noqa: B023, E731
                if way == "asgd":
                    body = lambda kind=kind: train(kind, "asgd()", seed, options.minibatches)  # noqa: B023, E731
                with weighed(way, seconds):
                    clock = paceline.Clock(compute=seconds, network=1e-4)
                    outs = [out for out in paceline.simulate(body, len(speeds), clock=clock) if out is not None]
                loss = round(outs[0][0], 4) if math.isfinite(outs[0][0]) else None
                rows.append([kind, name, way, seed, loss, [out[1] for out in outs]])
                print(*rows[-1], flush=True)
                if options.keep is not None:
                    with options.keep.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")

    def over(kind: str, name: str, way: str) -> float | None:
        """Of the mean losses; None where the way diverged."""
        ours, theirs = ([row[4] for row in rows if row[:3] == [kind, name, one]] for one in ("samples", way))
        return None if None in theirs else round(statistics.fmean(ours) / statistics.fmean(theirs) - 1, 4)

    others = [way for way in (*WAYS, "asgd") if way != "samples"]
    found = {way: {f"{kind}, {name}": over(kind, name, way) for kind in kinds for name in mixes} for way in others}
    print(json.dumps({"loss_over": found, "losses": rows}))


if __name__ == "__main__":
    main()
