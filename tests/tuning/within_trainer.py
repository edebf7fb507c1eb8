# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model and logs a held-out loss made by hand; writes which periods each worker saw, and its model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import paceline

STEPS = 640


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = paceline.attach(model, optimizer)
    periods: list[int] = []
    with run:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(4, 3) * (1 + run.world.rank)).square().mean().backward()
            optimizer.step()
            if step % 4 == 3:
                run.log(held_out=5.0 * (step + 1) ** -0.2)
            period = run.rule.schedule.period
            if not periods or periods[-1] != period:
                periods.append(period)
    told = {"periods": periods, "sum": float(sum(p.detach().sum() for p in model.parameters()))}
    (folder / f"told.{run.world.rank}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
