# SPDX-License-Identifier: Apache-2.0
"""What every small program begins with: its data, a loop, and `note`, which prints what the judge reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

B = int(os.environ.get("COMPLAINT_BATCH", "4"))
"""A batch of one worker; the reference of a synchronous rule, one process, has that of all workers."""
PARTS = int(os.environ.get("COMPLAINT_PARTS", "1"))
"""How many workers' batches are in a batch: the reference takes each by itself where a batch is more than a sum."""

ALONE = "COMPLAINT_ALONE" in os.environ
"""Whether this is the reference."""


def note(**values: Any) -> None:
    """Print values for the judge."""
    print("@note", json.dumps(values, default=lambda value: value.tolist()), flush=True)


def points(n: int = 48, classes: int = 0) -> TensorDataset:
    """(input, target, index): linear, or of so many classes."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1))
    y = x @ torch.arange(1.0, 5)[:, None] / 4
    return TensorDataset(x, (x[:, :classes] * 2).argmax(1) if classes else y, torch.arange(n))


def batches(n: int = 48, **options: Any) -> DataLoader[Any]:
    """The usual loader over `points`."""
    return DataLoader(points(n), **{"batch_size": B, **options})


def net(hidden: int = 8, out: int = 1) -> nn.Sequential:
    """The same small network each time."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, out))


def normed() -> nn.Sequential:
    """The same with a BatchNorm."""
    return nn.Sequential(net()[0], nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def flat(model: nn.Module) -> list[float]:
    """Its parameters, one after another."""
    real = [torch.view_as_real(p) if p.is_complex() else p for p in model.parameters()]
    return torch.cat([p.detach().double().flatten() for p in real]).tolist()


def kept(model: nn.Module) -> list[float]:
    """Its buffers, one after another."""
    return torch.cat([b.double().flatten() for b in model.buffers()]).tolist()


def mse(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((out - y) ** 2).mean()


def held(model: nn.Module) -> float:
    """The loss on all points, in evaluation mode."""
    x, y, _ = points().tensors
    model.eval()
    with torch.no_grad():
        loss = float(mse(model(x), y))
    model.train()
    return loss


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    loader: Iterable[Any],
    epochs: int = 3,
    loss: Callable[..., torch.Tensor] | None = None,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[], Any] = lambda: None,
) -> list[int]:
    """The usual loop, with what comes before and after each step; the indices that it saw."""
    seen: list[int] = []
    for _ in range(epochs):
        for x, y, i in loader:
            opt.zero_grad()
            (loss(x, y, i) if loss else mse(model(x), y)).backward()
            before()
            opt.step()
            after()
            seen += i.tolist()
    return seen


def fit(model: nn.Module, *rates: float, **more: Any) -> None:
    """Train it with SGD, and note where it began and ended."""
    note(start=held(model))
    opt = SGD(model.parameters(), lr=rates[0] if rates else 0.05)
    train(model, opt, more.pop("loader", None) or batches(), **more)
    note(w=flat(model), loss=held(model))
