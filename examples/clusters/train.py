# SPDX-License-Identifier: Apache-2.0
"""A program that every example of this folder starts: a small classifier, its checkpoints, and where it resumed.

It says nothing of the cluster. Who this worker is it learns from paceline, whoever has started it.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def train(epochs: int, rule: str | None, checkpoint: str | None) -> tuple[int, float]:
    """Train, resuming from `checkpoint` if there is one; the number of workers and the last loss."""
    torch.manual_seed(0)
    x = torch.randn(2000, 20)
    y = (x[:, :5].sum(1) > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    with paceline.attach(model, optimizer, rule, checkpoint=checkpoint, every_blocks=2) as run:
        if checkpoint is not None and run.resume() and run.world.rank == 0:
            print(f"goes on behind {run.minibatches} minibatches", flush=True)
        for epoch in range(run.epoch, epochs):
            for inputs, targets in run.share(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}, worker {run.world.rank} of {run.world.size}: loss {loss.item():.3f}", flush=True)
        return run.world.size, loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rule")
    parser.add_argument("--checkpoint")
    wishes = parser.parse_args()
    train(wishes.epochs, wishes.rule, wishes.checkpoint)
