# SPDX-License-Identifier: Apache-2.0
"""Digits of scikit-learn, 1,437 to train on and 360 to test, and a net, for the examples beside this file."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

TRAINING = 1437


class Digits(Dataset[dict[str, Tensor]]):
    """x, shape (64,), 0 to 1, and the label."""

    def __init__(self, training: bool) -> None:
        part = slice(None, TRAINING) if training else slice(TRAINING, None)
        found = load_digits()
        self.x = torch.tensor(found.data[part], dtype=torch.float32) / 16
        self.y = torch.tensor(found.target[part])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    """A perceptron that returns what the Trainer of transformers wants: loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def accuracy(model: nn.Module) -> float:
    """Part of the test digits that are read right."""
    test = Digits(training=False)
    device = next(model.parameters()).device
    with torch.no_grad():
        scores = model(test.x.to(device), test.y.to(device))["logits"]
    return float((scores.argmax(1).cpu() == test.y).float().mean())
