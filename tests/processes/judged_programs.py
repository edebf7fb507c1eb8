# SPDX-License-Identifier: Apache-2.0
"""A training whose members are judged by held-out loss, in virtual workers and in processes.

python -m tests.processes.judged_programs NAME DIRECTORY RULE
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import paceline
from tests.helpers import adam, momentum_sgd, state_of

FEATURES = 12


def teacher(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs (samples, FEATURES) and noisy values (samples, 1) of one linear teacher."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(FEATURES, 1, generator=generator)
    generator.manual_seed(1000 + seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, x @ weights + 0.3 * torch.randn(samples, 1, generator=generator)


@dataclass
class Training:
    """A regression on data of each worker's own; with `ascends`, that worker climbs from step `since` on.

    Attributes:
        held_out: makes the function of the guard; None for norms alone.
        touches: whether that function changes all that it must not.
    """

    rule: str = "averaging(period=4)"
    steps: int = 160
    lr: float = 0.01
    ascends: int = -1
    since: int = 0
    until: int = 1 << 30
    held_out: bool = True
    touches: bool = False
    norm: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    guard: dict[str, Any] = field(default_factory=dict)
    save_at: int = -1
    place: Path | None = None
    batch: int = 16

    def __call__(self) -> dict[str, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.1 if self.norm else 0.0))
        model.extend([nn.BatchNorm1d(16)] if self.norm else [])
        model.append(nn.Linear(16, 1))
        make = adam if "adam" in self.rule else momentum_sgd
        optimizer = make(model.parameters())
        optimizer.param_groups[0]["lr"] = self.lr
        calls: list[float] = []

        def held_out() -> Tensor:
            model.eval()
            x, y = teacher(256, 500 + run.world.rank)
            loss = nn.functional.mse_loss(model(x), y)
            calls.append(float(loss))
            if self.touches:
                touch(model)
            return loss

        given = paceline.Guard(held_out=held_out, **self.guard) if self.held_out else "auto"
        run = paceline.attach(model, optimizer, self.rule, guard=given, timeout_s=20, **self.settings)
        if self.place is not None and self.save_at < 0:
            run.resume(self.place)
        rank = run.world.rank
        for step in range(run.minibatches, self.steps):
            x, y = teacher(self.batch, 10_000 + 97 * step + rank)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            (-loss if rank == self.ascends and self.since <= step < self.until else loss).backward()
            optimizer.step()
            if step == self.save_at:
                run.save(self.place)
        run.close()
        x, y = teacher(1024, 0)
        model.eval()
        with torch.no_grad():
            final = float(nn.functional.mse_loss(model(x), y))
        return {"model": state_of(model), "final": final, "calls": calls, "random": torch.rand(3)}


def touch(model: nn.Module) -> None:
    """Everything that a function may change by accident."""
    model.train(not model[2].training)
    with torch.enable_grad():
        model(torch.randn(8, FEATURES)).sum().backward()  # also writes running statistics
    for module in model:
        for name, buffer in list(module._buffers.items()):
            assert buffer is not None
            module._buffers[name] = torch.zeros_like(buffer)
    random.random()
    np.random.rand()
    torch.rand(5)
    torch.manual_seed(1)


def judged(rule: str, log: Path) -> Training:
    """A training with a member that climbs."""
    return Training(rule, steps=400, lr=0.0004, batch=32, ascends=1, norm=True, settings={"log": log})


def main(directory: Path, rule: str) -> None:
    """Train with a member that climbs, and write the model."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    out = judged(rule, directory)()
    save_file(out["model"], directory / f"model.{os.environ['RANK']}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[2]), sys.argv[3])
