# SPDX-License-Identifier: Apache-2.0
"""A recommender: which names occur in which part of Python's library, by two embeddings; Adam at a constant rate."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import names

WIDTH, BATCH, NEGATIVES = 16, 32, 8
seed, rate, minibatches = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)
pairs = {name: torch.from_numpy(one) for name, one in names().items()}
parts, known = (int(one) for one in pairs["sizes"])


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.name, self.bias = nn.Embedding(parts, WIDTH), nn.Embedding(known, WIDTH), nn.Embedding(known, 1)
        for table in (self.part, self.name, self.bias):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, part: Tensor, names: Tensor) -> Tensor:
        return (self.part(part)[:, None] * self.name(names)).sum(-1) + self.bias(names)[..., 0]


def loss_of(model: nn.Module, rows: Tensor, dice: torch.Generator) -> Tensor:
    others = torch.randint(0, known, (len(rows), NEGATIVES), generator=dice)
    scores = model(rows[:, 0], torch.cat([rows[:, 1:], others], 1))
    return F.cross_entropy(scores, torch.zeros(len(rows), dtype=torch.long))


train = pairs["train"][: minibatches * BATCH // 2]
loader = DataLoader(TensorDataset(train), BATCH, shuffle=True)
model = Pairs()
optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-3 * rate)
dice = torch.Generator().manual_seed(seed)
for _ in range(2):
    for (rows,) in loader:
        optimizer.zero_grad()
        loss_of(model, rows, dice).backward()
        optimizer.step()
with torch.no_grad():
    held = loss_of(model, pairs["held_out"][:8192], torch.Generator().manual_seed(1))
    print(f"held-out loss {held.item():.4f}")
