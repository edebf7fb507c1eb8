# SPDX-License-Identifier: Apache-2.0
"""A CNN with batch normalization on pictures of letters: SGD with momentum, weight decay, a cosine over the epochs."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from data import SYMBOLS, letters

BATCH, EPOCHS = 32, 10
seed, rate, minibatches = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)


def layer(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


pictures = {name: torch.from_numpy(one) for name, one in letters(minibatches * BATCH // EPOCHS).items()}
loader = DataLoader(TensorDataset(pictures["x"][:, None], pictures["y"]), BATCH, shuffle=True, drop_last=True)
model = nn.Sequential(layer(1, 12), layer(12, 24), layer(24, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten())
model.append(nn.Linear(32, len(SYMBOLS)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * rate, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
for _ in range(EPOCHS):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    schedule.step()
model.eval()
with torch.no_grad():
    print(f"held-out loss {F.cross_entropy(model(pictures['held_x'][:, None]), pictures['held_y']).item():.4f}")
