# SPDX-License-Identifier: Apache-2.0
"""A training whose number of workers grows, in virtual workers and in processes.

python -m tests.processes.grown_programs NAME DIRECTORY RULE [STEPS]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from tests.helpers import State, adam, momentum_sgd

SAMPLES, BATCH = 131, 4


@dataclass
class Seen:
    """What a worker saw.

    Attributes:
        batches: (epoch, k, samples, steps of the schedule before, rate in the step) of each of its steps.
        model: its model at the end.
        workers: k at the end.
        period: at the end.
        rates: at the end.
    """

    batches: list[tuple[int, int, list[int], int, float]] = field(default_factory=list)
    model: State = field(default_factory=dict)
    workers: int = 0
    period: int = 0
    rates: list[float] = field(default_factory=list)


@dataclass
class Grown:
    """The program; `place` keeps a checkpoint after `every` exchanges, and goes on from one."""

    rule: str
    samples: int = SAMPLES
    batch: int = BATCH
    epochs: int = 2
    place: Path | None = None
    every: int = 1
    loader_processes: int = 0
    shuffle: bool = True
    merge: bool = True
    norm: bool = True
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None

    def __call__(self) -> Seen:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4) if self.norm else nn.Identity()
        model = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))
        make = self.optimizer or (adam if "adam" in self.rule else momentum_sgd)
        optimizer = make(model.parameters())
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
        inputs = torch.randn(self.samples, 3, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(inputs, torch.arange(self.samples))
        run = paceline.attach(
            model, optimizer, self.rule, checkpoint=self.place, every_blocks=self.every, keep=1000, timeout_s=60
        )
        run.include(schedule=schedule)
        if self.place is None or not run.resume():
            torch.manual_seed(77 + run.world.rank)
        loader = DataLoader(data, self.batch, shuffle=self.shuffle, num_workers=self.loader_processes)
        share, seen, rates = run.share(loader), Seen(), list[float]()
        optimizer.register_step_pre_hook(lambda one, *_: rates.append(float(one.param_groups[0]["lr"])))
        for epoch in range(run.epoch, self.epochs):
            for x, numbers in share:
                optimizer.zero_grad()
                (model(x) - 1).square().mean().backward()
                optimizer.step()
                seen.batches.append((epoch, training(run), numbers.tolist(), schedule.last_epoch, rates[-1]))
                schedule.step()
            if self.merge:
                run.merge()
        seen.workers, seen.period = training(run), run.rule.schedule.period
        run.close()
        seen.model = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        seen.rates = [float(group["lr"]) for group in optimizer.param_groups]
        return seen


def training(run: paceline.Run) -> int:
    """k at present."""
    growth = run._parts.engine.growth  # type: ignore[union-attr]
    return int(growth.workers)


def main(directory: Path, rule: str, place: Path | None) -> None:
    """Train, and write what this worker saw."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    seen = Grown(rule, place=place, every=1000)()
    rank = os.environ["RANK"]
    save_file(seen.model, directory / f"model.{rank}.safetensors")
    (directory / f"seen.{rank}").write_text(json.dumps(seen.batches))


if __name__ == "__main__":
    main(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]) if len(sys.argv) > 4 else None)
