# SPDX-License-Identifier: Apache-2.0
"""A small transformer that writes Python, character by character, from the standard library's source."""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


def read_text(limit):
    """Character numbers of the library's modules, to train on and to test; one module in ten is for testing."""
    train, test = [], []
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        text = path.read_text(encoding="ascii", errors="replace").encode("ascii", errors="replace")
        (test if number % 10 == 0 else train).append(torch.frombuffer(bytearray(text + b"\n"), dtype=torch.uint8))
    return torch.cat(train)[:limit].long(), torch.cat(test)[: limit // 10].long()


class Windows(Dataset):
    """Pieces of `length` characters, and the same one character later."""

    def __init__(self, text, length):
        self.text = text
        self.length = length

    def __len__(self):
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index):
        begin = index * self.length
        return self.text[begin : begin + self.length], self.text[begin + 1 : begin + self.length + 1]


class Transformer(nn.Module):
    def __init__(self, characters, length, size, heads, layers):
        super().__init__()
        self.embed = nn.Embedding(characters, size)
        self.position = nn.Parameter(0.02 * torch.randn(length, size))
        layer = nn.TransformerEncoderLayer(
            size, heads, 4 * size, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(size), enable_nested_tensor=False)
        self.head = nn.Linear(size, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text):
        x = self.embed(text) + self.position
        return self.head(self.encoder(x, mask=self.mask, is_causal=True))


def warm_up_and_cosine(step, warm_up, steps):
    """The part of the full rate at a step."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up))))


def train(args, model, device, loader, optimizer, scheduler, epoch):
    model.train()
    for batch, (text, following) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text.to(device)).flatten(0, 1), following.to(device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        if batch % args.log_interval == 0:
            rate = scheduler.get_last_lr()[0]
            print(f"epoch {epoch} batch {batch}/{len(loader)} loss {loss.item():.4f} rate {rate:.5f}")


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    total, count = 0.0, 0
    for text, following in loader:
        output = model(text.to(device)).flatten(0, 1)
        total += F.cross_entropy(output, following.to(device).flatten(), reduction="sum").item()
        count += following.numel()
    print(f"test loss {total / count:.4f}, {total / count / math.log(2):.3f} bits a character")
    return total / count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--characters", type=int, default=500_000, help="of the text to train on, at most")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1.6e-2)
    parser.add_argument("--warm-up", type=float, default=0.05, help="of all steps")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_text, test_text = read_text(args.characters)
    train_loader = DataLoader(Windows(train_text, args.length), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(Windows(test_text, args.length), batch_size=100)
    model = Transformer(128, args.length, args.size, args.heads, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    steps = len(train_loader) * args.epochs
    warm_up = max(1, round(args.warm_up * steps))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, warm_up, steps))

    loss = test(model, device, test_loader)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, scheduler, epoch)
        loss = test(model, device, test_loader)
    print(f"final loss {loss:.4f}")


if __name__ == "__main__":
    main()
