# SPDX-License-Identifier: Apache-2.0
"""A small ConvNeXt on pictures of letters: AdamW, warm-up and cosine, label smoothing, mixup."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import SYMBOLS, letters

WIDTH, BATCH, EPOCHS = 32, 32, 10
seed, rate, minibatches = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1, groups=WIDTH), nn.GroupNorm(1, WIDTH)
        self.wide, self.narrow = nn.Conv2d(WIDTH, 3 * WIDTH, 1), nn.Conv2d(3 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(self.depth(x)))))


def factor(step: int) -> float:
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


pictures = {name: torch.from_numpy(one) for name, one in letters(minibatches * BATCH // EPOCHS).items()}
loader = DataLoader(TensorDataset(pictures["x"][:, None], pictures["y"]), BATCH, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Conv2d(1, WIDTH, 4, 4), Block(), Block(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
model.append(nn.Linear(4 * WIDTH, len(SYMBOLS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3 * rate, weight_decay=0.05)
total = EPOCHS * len(loader)
warm = max(1, total // 20)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for _ in range(EPOCHS):
    for x, y in loader:
        share, other = torch.distributions.Beta(0.2, 0.2).sample(), torch.randperm(len(x))
        scores = model(share * x + (1 - share) * x[other])
        optimizer.zero_grad()
        (share * criterion(scores, y) + (1 - share) * criterion(scores, y[other])).backward()
        optimizer.step()
        schedule.step()
with torch.no_grad():
    print(f"held-out loss {F.cross_entropy(model(pictures['held_x'][:, None]), pictures['held_y']).item():.4f}")
