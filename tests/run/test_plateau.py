# SPDX-License-Identifier: Apache-2.0
"""A rate that follows the held-out loss of the global model: one rate for all workers, at the same epoch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import paceline
from tests.helpers import follow

EPOCHS, WORKERS = 6, 4
Epochs = list[tuple[float, float]]
"""Of one worker: held-out loss, and the rate after it."""


def data() -> tuple[Tensor, Tensor]:
    """Inputs and targets with so much noise that a high rate soon gains nothing more."""
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(96, 3, generator=dice)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]]) + torch.randn(96, 1, generator=dice)


def program(rule: str) -> Epochs:
    """A program of two lines, whose rate follows the loss."""
    torch.manual_seed(0)
    (x, y), model = data(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.01)
    run, seen = paceline.attach(model, optimizer, rule), []
    share = run.share(DataLoader(TensorDataset(x[:64], y[:64]), batch_size=2, shuffle=True))
    with run:
        for _ in range(EPOCHS):
            for inputs, targets in share:
                follow(optimizer, (model(inputs) - targets).square().mean())
            with run.global_model(), torch.no_grad():
                loss = float((model(x[64:]) - y[64:]).square().mean())
            plateau.step(loss)
            seen.append((loss, optimizer.param_groups[0]["lr"]))
    return seen


@pytest.mark.parametrize("rule", ["bmuf(period=5)", "averaging(period=3)", "bmuf(period=5, overlap=1)"])
def test_all_workers_lower_their_rate_at_the_same_epoch(rule: str) -> None:
    first, *others = paceline.simulate(lambda: program(rule), WORKERS)
    assert all(one == first for one in others)
    assert len({rate for _, rate in first}) > 1  # it was lowered at all
