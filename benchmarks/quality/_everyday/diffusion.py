# SPDX-License-Identifier: Apache-2.0
"""A diffusion model of pictures of letters, which predicts their noise: Adam at a constant rate, clipping."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import letters

WIDTH, BATCH, EPOCHS = 16, 16, 4
seed, rate, minibatches = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.time = nn.GroupNorm(4, WIDTH), nn.Linear(16, WIDTH)
        self.first, self.second = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1), nn.Conv2d(WIDTH, WIDTH, 3, 1, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Conv2d(4, WIDTH, 3, 1, 1), nn.Conv2d(WIDTH, 4, 3, 1, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * 2.0 ** torch.arange(8)
        time = torch.cat([angles.sin(), angles.cos()], 1)
        x = self.begin(F.pixel_unshuffle(x, 2))
        for block in self.blocks:
            x = block(x, time)
        return F.pixel_shuffle(self.end(x), 2)


def loss_of(model: nn.Module, x: Tensor, dice: torch.Generator | None = None) -> Tensor:
    t, noise = torch.rand(len(x), generator=dice), torch.randn(x.shape, generator=dice)
    angle = (t * math.pi / 2)[:, None, None, None]
    return F.mse_loss(model(angle.cos() * (2 * x - 1) + angle.sin() * noise, t), noise)


made = letters(minibatches * BATCH // EPOCHS)
pictures, held = torch.from_numpy(made["x"])[:, None], torch.from_numpy(made["held_x"])[:4096, None]
loader = DataLoader(TensorDataset(pictures), BATCH, shuffle=True, drop_last=True)
model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 * rate)
for _ in range(EPOCHS):
    for (x,) in loader:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
with torch.no_grad():
    print(f"held-out loss {loss_of(model, held, torch.Generator().manual_seed(1)).item():.4f}")
