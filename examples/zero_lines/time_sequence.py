# SPDX-License-Identifier: Apache-2.0
"""An LSTM that has heard the beginning of a noisy sine wave and goes on with it."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def waves(count, length, noise, generator):
    """Sine waves of any phase and of periods from 10 to 30 steps: as they are heard, and without the noise."""
    phase = 2 * math.pi * torch.rand(count, 1, generator=generator)
    period = 10 + 20 * torch.rand(count, 1, generator=generator)
    clean = torch.sin(2 * math.pi * torch.arange(length) / period + phase)
    return clean + noise * torch.randn(count, length, generator=generator), clean


class Sequence(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, heard, future=0):
        """The next value behind each of `heard` (batch, steps), and `future` more that nobody has heard."""
        output, state = self.lstm(heard.unsqueeze(2))
        found = [self.linear(output).squeeze(2)]
        for _ in range(future):
            output, state = self.lstm(found[-1][:, -1:].unsqueeze(2), state)
            found.append(self.linear(output).squeeze(2))
        return torch.cat(found, dim=1)


def train(args, model, device, loader, optimizer, scheduler, epoch):
    model.train()
    for batch, (wave,) in enumerate(loader):
        wave = wave.to(device)
        optimizer.zero_grad()
        loss = F.mse_loss(model(wave[:, :-1]), wave[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if batch % args.log_interval == 0:
            print(f"epoch {epoch} batch {batch}/{len(loader)} loss {loss.item():.4f}")
    scheduler.step()


def test(model, device, loader):
    model.eval()
    loss = 0.0
    with torch.no_grad():
        for (wave,) in loader:
            wave = wave.to(device)
            loss += F.mse_loss(model(wave[:, :-1]), wave[:, 1:]).item() * len(wave)
    print(f"test loss {loss / len(loader.dataset):.4f}")
    return loss / len(loader.dataset)


def predict(model, device, heard, clean):
    """Go on with some waves and show the first of them; the error is that from the wave without noise."""
    model.eval()
    with torch.no_grad():
        ahead = clean.shape[1] - heard.shape[1]
        found = model(heard.to(device), future=ahead - 1).cpu()[:, -ahead:]
    for step in range(0, ahead, 4):
        wave = clean[0, heard.shape[1] + step]
        print(f"  {step + 1:2d} steps ahead: {found[0, step]:+.2f}, the wave is at {wave:+.2f}")
    error = F.mse_loss(found, clean[:, -ahead:]).sqrt().item()
    print(f"{ahead} steps into the future: error {error:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--waves", type=int, default=8_000, help="waves in an epoch")
    parser.add_argument("--length", type=int, default=40)
    parser.add_argument("--noise", type=float, default=0.4)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--gamma", type=float, default=0.7, help="the rate falls by this factor each epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=125)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    test_waves, _ = waves(1_000, args.length, args.noise, generator)
    future_waves, future_clean = waves(100, 2 * args.length, args.noise, generator)
    train_waves, _ = waves(args.waves, args.length, args.noise, generator)
    train_loader = DataLoader(TensorDataset(train_waves), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(test_waves), batch_size=250)
    model = Sequence(args.hidden).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, args.gamma)

    loss = test(model, device, test_loader)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, scheduler, epoch)
        loss = test(model, device, test_loader)
    predict(model, device, future_waves[:, : args.length], future_clean)
    print(f"final loss {loss:.4f}")


if __name__ == "__main__":
    main()
