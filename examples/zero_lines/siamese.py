# SPDX-License-Identifier: Apache-2.0
"""Are these two the same digit? A siamese network looks at noisy pairs and says how likely it is."""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    """Pair `index` is always the same one; half of the pairs are of one digit, and each picture has its own noise."""

    def __init__(self, images, labels, count, noise, seed):
        self.images = images
        self.labels = labels
        self.count = count
        self.noise = noise
        self.seed = seed
        self.where = [np.flatnonzero(labels == digit) for digit in range(10)]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = np.random.default_rng((self.seed, index))
        same = index % 2
        digit = draw.integers(10)
        other = digit if same else (digit + draw.integers(1, 10)) % 10
        first = self.where[digit][draw.integers(len(self.where[digit]))]
        second = self.where[other][draw.integers(len(self.where[other]))]
        pair = self.images[[first, second]] + self.noise * draw.standard_normal((2, 64), dtype=np.float32)
        return torch.from_numpy(pair), torch.tensor(float(same))


class Siamese(nn.Module):
    def __init__(self, hidden=64, features=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, features))
        self.head = nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, pairs):
        """Logits (batch,) of pairs (batch, 2, 64)."""
        first, second = self.body(pairs).unbind(1)
        return self.head((first - second).abs()).squeeze(1)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for batch, (pairs, same) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(pairs.to(device)), same.to(device))
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            print(f"epoch {epoch} [{batch * args.batch_size}/{len(loader.dataset)}] loss {loss.item():.4f}")


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    loss, correct = 0.0, 0
    for pairs, same in loader:
        logits, same = model(pairs.to(device)), same.to(device)
        loss += F.binary_cross_entropy_with_logits(logits, same, reduction="sum").item()
        correct += ((logits > 0) == (same > 0.5)).sum().item()
    count = len(loader.dataset)
    print(f"test loss {loss / count:.4f}, {100 * correct / count:.1f} % right")
    return loss / count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=20_000, help="pairs in an epoch")
    parser.add_argument("--test-pairs", type=int, default=4_000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--noise", type=float, default=0.4, help="of a pixel; pixels go from 0 to 1")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--gamma", type=float, default=0.6, help="the rate falls by this factor each epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=250)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    images = digits.data.astype(np.float32) / 16
    parts = train_test_split(images, digits.target, test_size=0.25, random_state=0, stratify=digits.target)
    train_images, test_images, train_labels, test_labels = parts
    train_set = Pairs(train_images, train_labels, args.pairs, args.noise, seed=1)
    test_set = Pairs(test_images, test_labels, args.test_pairs, args.noise, seed=0)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=500)
    model = Siamese().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    loss = test(model, device, test_loader)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        loss = test(model, device, test_loader)
        scheduler.step()
    print(f"final loss {loss:.4f}")


if __name__ == "__main__":
    main()
