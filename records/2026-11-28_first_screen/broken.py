# SPDX-License-Identifier: Apache-2.0
"""A program of two lines whose worker 1 has only NaN."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
data = TensorDataset(torch.randn(6000, 16), torch.randint(0, 4, (6000,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.attach(model, optimizer, rule="bmuf(period=16)")

for epoch in range(2):
    for x, y in run.share(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if run.world.rank == 1:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    if run.world.rank == 0:
        print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
run.close()
