# SPDX-License-Identifier: Apache-2.0
"""Receipts of small runs among virtual workers, sealed, and ways to alter them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.communication.sockets.certificates import Authority
from paceline_plugins.receipts import seal
from paceline_plugins.receipts.chain import FIRST, canonical, chain_name, hash_of
from tests.helpers import follow

WORKERS, SAMPLES, BATCH = 3, 40, 2
EXACT = "bmuf(period=4, reproducible=True)"
Line = dict[str, Any]


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=made), torch.randn(SAMPLES, 1, generator=made))


class Net(torch.nn.Module):
    """A model with a buffer that follows its inputs, averaged as running statistics are."""

    averages_buffers = True
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.second(torch.tanh(self.first(x - self.mean)))  # type: ignore[no-any-return]


def train(
    folder: Path | None,
    rule: str = EXACT,
    loader: Callable[[], Iterable[Any]] = lambda: DataLoader(data(), BATCH, shuffle=True),
    passes: int = 2,
    **settings: Any,
) -> list[torch.Tensor]:
    """Train a small model; its parameters in the end."""
    torch.manual_seed(0)
    model = Net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if "adam" in rule:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = loader()
    with paceline.attach(model, optimizer, rule, receipts=folder, **settings) as run:
        if "checkpoint" in settings:
            run.resume()
        for _ in range(run.epoch, passes):
            for x, y in run.share(batches):
                follow(optimizer, torch.nn.functional.mse_loss(model(x), y))
    return [p.detach().clone() for p in model.parameters()]


def write(monkeypatch: pytest.MonkeyPatch, folder: Path, rule: str = EXACT, **settings: Any) -> Authority:
    """A run with sealed receipts in `folder`/receipts, and its authority's certificate beside them."""
    authority = Authority.new()
    monkeypatch.setenv("PACELINE_RECEIPTS_AUTHORITY", f"{authority.job} {seal.fingerprint(authority.certificate)}")
    paceline.simulate(lambda: train(folder / "receipts", rule, **settings), WORKERS)
    monkeypatch.delenv("PACELINE_RECEIPTS_AUTHORITY")
    (folder / "authority.pem").write_text(seal.pem(authority.certificate))
    assert seal.write(folder / "receipts", authority, 0, range(WORKERS)) == []
    return authority


def lines_of(folder: Path, rank: int) -> list[Line]:
    return [json.loads(text) for text in (folder / chain_name(rank)).read_text().splitlines()]


def put(folder: Path, rank: int, lines: Iterable[Line]) -> None:
    """Write lines as they are."""
    (folder / chain_name(rank)).write_text("".join(canonical(line) + "\n" for line in lines))


def forge(folder: Path, rank: int, change: Callable[[list[Line]], None]) -> None:
    """Change a chain, and compute all numbers and hashes anew."""
    lines, previous = lines_of(folder, rank), FIRST
    change(lines)
    for number, line in enumerate(lines, 1):
        line["line"], line["prev"] = number, previous
        previous = hash_of(canonical(line))
    put(folder, rank, lines)
