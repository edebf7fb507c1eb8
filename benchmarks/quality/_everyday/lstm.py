# SPDX-License-Identifier: Apache-2.0
"""An LSTM on the characters of Python's library: Adam, OneCycleLR (which cycles beta1, too), clipping."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import text

LENGTH, BATCH = 21, 8
seed, rate, minibatches = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(97, 32), nn.LSTM(32, 48, batch_first=True), nn.Linear(48, 97)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x))[0])


def rows(name: str, count: int) -> Tensor:
    return torch.from_numpy(text()[name]).long()[: count * LENGTH].view(count, LENGTH)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


loader = DataLoader(TensorDataset(rows("train", minibatches * BATCH)), BATCH, shuffle=True)
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=8e-3 * rate)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3 * rate, len(loader))
for (x,) in loader:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
with torch.no_grad():
    print(f"held-out loss {loss_of(model, rows('held_out', 4096)).item():.4f}")
