# SPDX-License-Identifier: Apache-2.0
"""A diffusion model of pictures of letters: Adam at a constant rate, judged by a moving average of its weights."""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import letters

WIDTH, BATCH, STEPS, DECAY = 24, 32, 100, 0.995
seed, rate, minibatches = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(STEPS, WIDTH), nn.Linear(WIDTH, 2 * WIDTH))
        self.down, self.middle = nn.Conv2d(1, WIDTH, 3, 2, 1), nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1), nn.ConvTranspose2d(2 * WIDTH, 1, 4, 2, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        first = torch.nn.functional.silu(self.down(x))
        inner = torch.nn.functional.silu(self.middle(first) + self.time(t)[..., None, None])
        return self.last(torch.cat([first, torch.nn.functional.silu(self.up(inner))], 1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    t, noise = torch.randint(0, STEPS, (len(x),)), torch.randn_like(x)
    kept = torch.cos((t + 1) / STEPS * torch.pi / 2)[:, None, None, None]
    return ((model(kept * x + (1 - kept**2).sqrt() * noise, t) - noise) ** 2).mean()


pictures = {name: torch.from_numpy(one) for name, one in letters(minibatches * BATCH // 5).items()}
loader = DataLoader(TensorDataset(pictures["x"][:, None]), BATCH, shuffle=True, drop_last=True)
model = Denoiser()
average = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 * rate)
for _ in range(5):
    for (x,) in loader:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.mul_(DECAY).add_(now, alpha=1 - DECAY)
torch.manual_seed(1)
with torch.no_grad():
    print(f"held-out loss {loss_of(average, pictures['held_x'][:4096, None]).item():.4f}")
