# SPDX-License-Identifier: Apache-2.0
"""Photographs at twice their size, by convolutions whose channels become the pixels between."""

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_sample_images
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class SuperResolution(nn.Module):
    """What it adds to a plain bilinear picture is all it has to learn."""

    def __init__(self, channels=16, scale=2):
        super().__init__()
        self.scale = scale
        self.conv1 = nn.Conv2d(1, channels, 5, padding=2)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv3 = nn.Conv2d(channels, scale**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(scale)

    def forward(self, x):
        details = F.relu(self.conv2(F.relu(self.conv1(x))))
        plain = F.interpolate(x, scale_factor=self.scale, mode="bilinear", align_corners=False)
        return plain + self.shuffle(self.conv3(details))


def patches(picture, size, stride):
    """All squares of a picture (height, width), as (count, 1, size, size)."""
    return picture.unfold(0, size, stride).unfold(1, size, stride).reshape(-1, 1, size, size)


def load_data(size, stride):
    """Pairs of a small and a large square; the right fifth of each photograph is for testing."""
    train, test = [], []
    weights = torch.tensor([0.299, 0.587, 0.114])
    for image in load_sample_images().images:
        grey = torch.tensor(image, dtype=torch.float32) @ weights
        grey = (grey - 128) / 64
        border = grey.shape[1] * 4 // 5
        train.append(patches(grey[:, :border], size, stride))
        test.append(patches(grey[:, border:], size, size))
    train, test = torch.cat(train), torch.cat(test)
    return TensorDataset(F.avg_pool2d(train, 2), train), TensorDataset(F.avg_pool2d(test, 2), test)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for batch, (small, large) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(small.to(device)), large.to(device))
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            print(f"epoch {epoch} batch {batch}/{len(loader)} loss {loss.item():.4f}")


def test(model, device, loader):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for small, large in loader:
            total += F.mse_loss(model(small.to(device)), large.to(device), reduction="sum").item()
            count += large.numel()
    error = total / count
    psnr = 10 * math.log10((255 / 64) ** 2 / error)
    print(f"test loss {error:.4f}, PSNR {psnr:.2f} dB")
    return error


def save_checkpoint(model, optimizer, folder, epoch):
    folder.mkdir(parents=True, exist_ok=True)
    state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"epoch_{epoch:02d}.pt")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--patch-size", type=int, default=24, help="pixels of a side, of the large picture")
    parser.add_argument("--stride", type=int, default=12, help="pixels from one patch to the next")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--gamma", type=float, default=0.6, help="the rate falls by this factor each epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out/super_resolution"), help="folder for checkpoints")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = load_data(args.patch_size, args.stride)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=64)
    model = SuperResolution().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, args.gamma)

    loss = test(model, device, test_loader)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        loss = test(model, device, test_loader)
        save_checkpoint(model, optimizer, args.out, epoch)
        scheduler.step()
    print(f"final loss {loss:.4f}")


if __name__ == "__main__":
    main()
