# SPDX-License-Identifier: Apache-2.0
"""Extreme classification: one of thousands of functions, with an output layer whose table is learned while it trains.

python train.py                                              # one worker
paceline run --workers 4 --rule "bmuf_adam(period=8)" train.py
python train.py --keep-table                                 # the first table, for comparison
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from data import Calls, load
from paceline_lightrnn import TableLearner, TwoComponentSoftmax, WordTable


class Classifier(nn.Module):
    """The mean of the names' vectors, a hidden layer, and the output layer."""

    def __init__(self, names: int, labels: int, width: int) -> None:
        super().__init__()
        self.names = nn.EmbeddingBag(names, width, mode="mean", padding_idx=0)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.output = TwoComponentSoftmax(WordTable.random(labels), width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.hidden(self.names(inputs))
        return found


@torch.no_grad()
def right(model: Classifier, samples: Calls) -> tuple[float, float]:
    """The share of samples whose label is the most probable one, and of those with it among the ten most probable."""
    model.eval()
    batches = DataLoader(samples, 500)
    found = [model.output.topk(model(inputs), 10)[0] == targets[:, None] for inputs, targets in batches]
    model.train()
    hits = torch.cat(found).float()
    return float(hits[:, 0].mean()), float(hits.sum(1).mean())


def main() -> None:
    """Train and print how many held-out calls are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=3_500, help="of Python, drawn from this machine's")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--keep-table", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    training, held_out, names, labels = load(args.files)
    model = Classifier(names, labels, args.width)
    size = sum(p.numel() for p in model.output.parameters())
    print(f"{len(training)} calls of {labels} functions; {size} numbers in the output layer, not {labels * args.width}")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    with paceline.attach(model, optimizer) as run:
        batches = run.share(DataLoader(training, 128, shuffle=True))
        learner = None if args.keep_table else TableLearner(model.output)
        for epoch in range(args.epochs):
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss = model.output(model(inputs), targets).loss
                loss.backward()
                optimizer.step()
            with run.global_model():
                first, ten = right(model, held_out)
            if run.world.rank == 0:
                print(f"epoch {epoch + 1}: {first:.1%} of the held-out calls are right, {ten:.1%} among the first ten")
            if learner is not None and epoch < args.epochs // 2:
                learner.reallocate(run)


if __name__ == "__main__":
    main()
