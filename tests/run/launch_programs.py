# SPDX-License-Identifier: Apache-2.0
"""Functions for tests of `paceline.launch`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import torch

import paceline


def train(rate: float) -> tuple[int, float]:
    """Four steps with the gradients 0 and 1: the mean of the weights is -2 rates."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with paceline.attach(model, optimizer, period=2) as run:
        print(
            f"the rule is {run.rule.name}, and this function came {'by value' if __name__ == '__main__' else 'by name'}"
        )
        for _ in range(4):
            model.weight.grad = torch.full_like(model.weight, run.world.rank)
            optimizer.step()
        return run.world.rank, round(model.weight.item(), 4)


def rank() -> int:
    """Share nothing."""
    return int(os.environ["RANK"])


def fail_on_one() -> None:
    """Rank 1 fails."""
    if rank() == 1:
        raise KeyError("no such layer")


def kill_one() -> None:
    """Rank 1 is killed."""
    if rank() == 1:
        os.kill(os.getpid(), 9)


def leave() -> NoReturn:
    """End the process well."""
    sys.exit(0)


def lock() -> Any:
    """What cannot be sent."""
    return threading.Lock()


def nested() -> None:
    """Launch within a worker."""
    paceline.launch(rank, 1)


def wait_for_ever(folder: Path) -> None:
    """Say that this worker is there, and wait."""
    (folder / f"worker-{os.getpid()}").touch()
    threading.Event().wait()
