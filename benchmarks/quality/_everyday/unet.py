# SPDX-License-Identifier: Apache-2.0
"""A U-Net that takes the noise off pictures of letters: Adam, the rate down to a tenth in two steps, BatchNorm."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import letters

WIDTH, BATCH, EPOCHS = 8, 16, 4
seed, rate, minibatches = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)


def layers(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = layers(1, WIDTH), layers(WIDTH, 2 * WIDTH), layers(2 * WIDTH, 4 * WIDTH)
        self.up2, self.up1 = layers(6 * WIDTH, 2 * WIDTH), layers(3 * WIDTH, WIDTH)
        self.out = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        y = self.middle(F.max_pool2d(second, 2))
        y = self.up2(torch.cat([F.interpolate(y, scale_factor=2), second], 1))
        y = self.up1(torch.cat([F.interpolate(y, scale_factor=2), first], 1))
        return x - self.out(y)


def loss_of(model: nn.Module, clean: Tensor, dice: torch.Generator) -> Tensor:
    return 100 * F.mse_loss(model(clean + 0.4 * torch.randn(clean.shape, generator=dice)), clean)


made = letters(minibatches * BATCH // EPOCHS)
pictures, held = torch.from_numpy(made["x"])[:, None], torch.from_numpy(made["held_x"])[:4096, None]
loader = DataLoader(TensorDataset(pictures), BATCH, shuffle=True, drop_last=True)
model = UNet()
optimizer = torch.optim.Adam(model.parameters(), lr=6e-3 * rate)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [EPOCHS // 2, 3 * EPOCHS // 4], gamma=0.3)
dice = torch.Generator().manual_seed(seed)
for _ in range(EPOCHS):
    model.train()
    for (x,) in loader:
        optimizer.zero_grad()
        loss_of(model, x, dice).backward()
        optimizer.step()
    schedule.step()
model.eval()
with torch.no_grad():
    print(f"held-out loss {loss_of(model, held, torch.Generator().manual_seed(1)).item():.4f}")
