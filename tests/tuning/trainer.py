# SPDX-License-Identifier: Apache-2.0
"""Trains until somebody tunes it as the test says, then for three blocks more; writes what each worker saw."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import paceline

GIVE_UP_S = 120.0


def main(folder: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = paceline.attach(model, optimizer)
    (folder / f"begun.{run.world.rank}").touch()
    rates, left, until = [0.1], 6, time.monotonic() + GIVE_UP_S
    while left:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        rate = float(optimizer.param_groups[0]["lr"])
        if rate != rates[-1]:
            rates.append(rate)
        left -= rate == 0.025
        if run.minibatches % 64 == 0:  # the same on all workers, and so is the end
            over = run.messages.gather(time.monotonic() > until)
            if any(over):
                break
    told = {"rates": rates, "minibatches": run.minibatches, "period": getattr(run.rule.schedule, "period", 0)}
    run.close()
    told["sum"] = float(sum(p.sum() for p in model.parameters()))
    (folder / f"told.{run.world.rank}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
