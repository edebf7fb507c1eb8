# SPDX-License-Identifier: Apache-2.0
"""Digits under a rule of one's own and under two that paceline has, with virtual workers.

$ python examples/own_rule/train.py --workers 8
"""

from __future__ import annotations

import argparse

import torch
from fed_adam import FedAdam
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.rules.payload import Delta
from paceline.rules.rule import Rule
from paceline.rules.schedule import EveryBlock

TRAINING = 1437


def digits() -> TensorDataset:
    """1,797 digits of 8 x 8; the first 1,437 are for training."""
    found = load_digits()
    return TensorDataset(torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target))


def train(rule: Rule | str, epochs: int, workers: int) -> float:
    """The held-out loss of the global model."""
    images, labels = digits().tensors

    def worker() -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(images[:TRAINING], labels[:TRAINING]), batch_size=8, shuffle=True)
        run = paceline.attach(model, optimizer, rule)
        for _ in range(epochs):
            for inputs, targets in run.share(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        run.close()
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(images[TRAINING:]), labels[TRAINING:]))

    loss = paceline.simulate(worker, workers)[0]
    assert loss is not None
    return loss


def main() -> None:
    """Train with each rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.01, help="of the outer Adam")
    arguments = parser.parse_args()
    own = Rule(EveryBlock(4), Delta(), outer=FedAdam(lr=arguments.lr))
    for name, rule in {"averaging": "averaging(period=4)", "bmuf": "bmuf(period=4)", "outer Adam": own}.items():
        print(f"{name:12} {train(rule, arguments.epochs, arguments.workers):.4f}")


if __name__ == "__main__":
    main()
