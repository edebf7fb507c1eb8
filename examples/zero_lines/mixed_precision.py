# SPDX-License-Identifier: Apache-2.0
"""A residual network that reads noisy digits in mixed precision, with gradients accumulated over several batches.

Numbers are bfloat16 on a processor, and float16 with scaled gradients on a GPU.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x):
        return x + self.outer(F.relu(self.inner(self.norm(x))))


class ResidualNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


def noisy_digits(images, labels, copies, noise, seed):
    """Each digit several times, each time with other noise."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = images.repeat(copies, 1), labels.repeat(copies)
    return TensorDataset(images + noise * torch.randn(images.shape, generator=generator), labels)


def train(args, model, device, dtype, loader, optimizer, scaler, epoch):
    model.train()
    optimizer.zero_grad()
    for batch, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        with torch.autocast(device.type, dtype=dtype):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss / args.accumulate).backward()
        if (batch + 1) % args.accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if batch % args.log_interval == 0:
            print(f"epoch {epoch} batch {batch}/{len(loader)} loss {loss.item():.4f}")


@torch.inference_mode()
def test(model, device, dtype, loader):
    model.eval()
    loss, correct = 0.0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with torch.autocast(device.type, dtype=dtype):
            output = model(images)
        loss += F.cross_entropy(output.float(), labels, reduction="sum").item()
        correct += (output.argmax(1) == labels).sum().item()
    count = len(loader.dataset)
    print(f"test loss {loss / count:.4f}, {100 * correct / count:.1f} % right")
    return loss / count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--copies", type=int, default=20, help="noisy copies of each digit in an epoch")
    parser.add_argument("--noise", type=float, default=0.5, help="of a pixel; pixels go from 0 to 1")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2, help="batches to a step")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=400)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train_set = noisy_digits(parts[0], parts[2], args.copies, args.noise, seed=0)
    test_set = noisy_digits(parts[1], parts[3], 10, args.noise, seed=1)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=500)
    model = ResidualNet(args.width, args.depth).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs, eta_min=args.lr / 100)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    loss = test(model, device, dtype, test_loader)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, dtype, train_loader, optimizer, scaler, epoch)
        loss = test(model, device, dtype, test_loader)
        scheduler.step()
    print(f"final loss {loss:.4f}")


if __name__ == "__main__":
    main()
