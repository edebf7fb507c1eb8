# SPDX-License-Identifier: Apache-2.0
"""Digits, a small net, and the two lines in a plain loop, to which every framework's training is compared."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline

SAMPLES, BATCH, EPOCHS = 110, 8, 2
"""Batches do not divide the samples, nor workers the batches."""


class Digits(Dataset[dict[str, Tensor]]):
    """The first samples: x, shape (64,), labels and the sample's number."""

    def __init__(self, samples: int = SAMPLES) -> None:
        x, y = _digits()
        self.x, self.y = x[:samples], y[:samples]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index], "number": torch.tensor(index)}


@cache
def _digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


class Net(nn.Module):
    """A perceptron that keeps the numbers of the samples it was trained on."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 10))
        self.seen: list[int] = []

    def forward(self, x: Tensor, labels: Tensor, number: Tensor | None = None) -> dict[str, Tensor]:
        if self.training and number is not None:
            self.seen += number.tolist()
        scores = self.net(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def make_net(dropout: float = 0.0) -> Net:
    """The same on every worker."""
    torch.manual_seed(3)
    return Net(dropout)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loader(shuffle: bool = True) -> DataLoader[Any]:
    """Over the digits."""
    return DataLoader(Digits(), BATCH, shuffle=shuffle)


def plain_loop(rule: str, **settings: Any) -> Net:
    """The two lines in a loop of one's own, with accumulation over `every` batches and clipping to `clip`."""
    every, clip = settings.pop("every", 1), settings.pop("clip", None)
    model = make_net()
    optimizer = make_optimizer(model)
    data = loader()
    with paceline.attach(model, optimizer, rule, **settings) as run:
        torch.manual_seed(11)
        for _ in range(EPOCHS):
            part = run.share(data)
            for number, batch in enumerate(part, start=1):
                last = number % every == 0 or number == len(part)
                with contextlib.nullcontext() if last else run.no_sync():
                    (model(**batch)["loss"] / every).backward()
                if last:
                    if clip is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
                    optimizer.zero_grad()
    return model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's state."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def all_once(seen: list[list[int]], epochs: int = EPOCHS) -> bool:
    """Whether the workers have used every sample once an epoch, in whatever order."""
    return sorted(n for one in seen for n in one) == sorted(list(range(SAMPLES)) * epochs)
