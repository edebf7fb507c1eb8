# SPDX-License-Identifier: Apache-2.0
"""A small ViT on pictures of letters: AdamW, a warm-up, a cosine, label smoothing, mixup."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import SIDE, SYMBOLS, letters

WIDTH, PATCH, BATCH, EPOCHS = 48, 4, 16, 4
seed, rate, minibatches = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.place = nn.Parameter(0.02 * torch.randn(1, (SIDE // PATCH) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(SYMBOLS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.layers(x)).mean(1))


def factor(step: int) -> float:
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


pictures = {name: torch.from_numpy(one) for name, one in letters(minibatches * BATCH // EPOCHS).items()}
loader = DataLoader(TensorDataset(pictures["x"][:, None], pictures["y"]), BATCH, shuffle=True, drop_last=True)
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 * rate, weight_decay=0.05)
total = EPOCHS * len(loader)
warm = max(1, total // 20)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
mix = torch.distributions.Beta(0.2, 0.2)
for _ in range(EPOCHS):
    for x, y in loader:
        share, other = mix.sample().item(), torch.randperm(len(x))
        scores = model(share * x + (1 - share) * x[other])
        parts = (F.cross_entropy(scores, one, label_smoothing=0.1) for one in (y, y[other]))
        optimizer.zero_grad()
        sum(part * weight for part, weight in zip(parts, (share, 1 - share), strict=True)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
model.eval()
with torch.no_grad():
    print(
        f"held-out loss {F.cross_entropy(model(pictures['held_x'][:4096, None]), pictures['held_y'][:4096]).item():.4f}"
    )
