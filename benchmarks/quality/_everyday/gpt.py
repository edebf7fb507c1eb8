# SPDX-License-Identifier: Apache-2.0
"""A small GPT on the characters of Python's library: AdamW, a warm-up, a cosine to the end, clipping."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import text

CONTEXT, WIDTH, HEADS, BATCH = 32, 32, 4, 8
seed, rate, minibatches = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(97, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 97)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.place.weight)))


def windows(characters: Tensor, count: int) -> Tensor:
    at = torch.randint(0, len(characters) - CONTEXT - 1, (count,), generator=torch.Generator().manual_seed(1))
    return characters[at[:, None] + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def factor(step: int) -> float:
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


characters = {name: torch.from_numpy(one).long() for name, one in text().items()}
loader = DataLoader(TensorDataset(windows(characters["train"], minibatches * BATCH)), BATCH, shuffle=True)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * rate, betas=(0.9, 0.99), weight_decay=0.1)
total, warm = len(loader), max(1, len(loader) // 20)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
for (x,) in loader:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
with torch.no_grad():
    print(f"held-out loss {loss_of(model, windows(characters['held_out'], 4096)).item():.4f}")
