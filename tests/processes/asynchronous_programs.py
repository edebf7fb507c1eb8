# SPDX-License-Identifier: Apache-2.0
"""What the processes of tests/asynchronous run: `python -m tests.processes.asynchronous_programs NAME DIRECTORY`."""

from __future__ import annotations

import faulthandler
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import paceline
from tests.helpers import FEATURES, adam, make_data, momentum_sgd, sgd, state_of

RANK = int(os.environ.get("RANK", "0"))
WORKERS = int(os.environ.get("WORLD_SIZE", "1"))
OPTIMIZERS = {"sgd": sgd, "adam": adam, "momentum": momentum_sgd}

RULES: list[tuple[str, str]] = [
    ("asgd", "sgd"),
    ("asgd(period=4)", "sgd"),
    ("ssp(staleness=2)", "momentum"),
    ("dc_asgd", "sgd"),
    ("easgd(period=4)", "sgd"),
    ("adadelay", "sgd"),
    ("staleness_aware", "adam"),
]
"""Recipes, and the optimizer that each has."""
BIG = 96
"""Width of a layer: so that every worker owns a slice."""


def make_big(seed: int = 0) -> nn.Sequential:
    """A perceptron of some pieces, with buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, BIG), nn.BatchNorm1d(BIG), nn.Tanh(), nn.Linear(BIG, 3))


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This worker's minibatches, for ever the same samples in another order."""
    x, y = make_data(96).tensors
    g = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (8,), generator=g)
        yield x[rows], y[rows]


def loss_of(model: nn.Module) -> float:
    """On all samples."""
    x, y = make_data(96).tensors
    model.eval()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def keep(model: nn.Module, directory: Path, name: str, **numbers: float) -> None:
    """The model, with its loss and other numbers."""
    extra = {f"number.{k}": torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
    save_file({**state_of(model), **extra}, directory / f"{name}.{RANK}.safetensors")


def table(directory: Path) -> None:
    """Every rule, one attach after another in one program; rank 0 has less data, the last one more."""
    for number, (rule, kind) in enumerate(RULES):
        model = make_big()
        before = loss_of(model)
        model.train()
        optimizer = OPTIMIZERS[kind](model.parameters())
        log = directory / f"log.{number}"
        with paceline.attach(model, optimizer, rule, timeout_s=30, log=log) as run:
            for x, y in batches(40 + 10 * RANK):
                step(model, optimizer, x, y)
        keep(model, directory, str(number), before=before, after=loss_of(model), bytes=run.bytes_sent)


def lockstep(directory: Path) -> None:
    """ssp(staleness=0) and sync in rank order."""
    for name, rule in (("ssp", "ssp(staleness=0)"), ("sync", "sync(reproducible=True)")):
        model = make_big()
        optimizer = momentum_sgd(model.parameters())
        with paceline.attach(model, optimizer, rule, timeout_s=30):
            for x, y in batches(12):
                step(model, optimizer, x, y)
        keep(model, directory, name)


def reached(path: Path) -> bool:
    """Whether the test has said that it may go on."""
    return path.exists()


def faulty(directory: Path, rule: str, kind: str, timeout_s: str, least: str = "60") -> None:
    """Train until the test says `enough`; say in a file when it is under way."""
    model = make_big()
    optimizer = OPTIMIZERS[kind](model.parameters())
    before = loss_of(model)
    model.train()
    error = ""
    steps = 0
    try:
        with paceline.attach(model, optimizer, rule, timeout_s=float(timeout_s), log=directory / "log") as run:
            for x, y in batches(10**9):
                step(model, optimizer, x, y)
                steps += 1
                if steps == int(least):
                    (directory / f"going.{RANK}").touch()
                if reached(directory / "enough") or reached(directory / f"leave.{RANK}"):
                    break
                if reached(directory / f"raise.{RANK}"):
                    raise KeyError("the user's own")
        keep(model, directory, "model", before=before, after=loss_of(model), steps=steps, bytes=run.bytes_sent)
    except paceline.PacelineError as problem:
        error = f"{type(problem).__name__}: {problem}"
        raise
    finally:
        (directory / f"ended.{RANK}").write_text(error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    faulthandler.dump_traceback_later(100, exit=True)  # a deadline of its own, with a trace
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    faulthandler.cancel_dump_traceback_later()
