# SPDX-License-Identifier: Apache-2.0
"""A program with paceline's lines in it, for a first run of what is installed."""

from __future__ import annotations

import torch

import paceline

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with paceline.attach(model, optimizer, "bmuf", period=2) as run:
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 3)).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss.item())
print("paceline is in", paceline.__file__)
