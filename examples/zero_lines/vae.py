# SPDX-License-Identifier: Apache-2.0
"""A variational autoencoder that learns to draw digits; each epoch ends with a picture of what it draws."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

try:
    from PIL import Image
except ImportError:
    Image = None


class VAE(nn.Module):
    def __init__(self, hidden=96, latent=8):
        super().__init__()
        self.latent = latent
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, latent)
        self.log_variance = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x):
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(code), mean, log_variance

    def sample(self, count, generator):
        code = torch.randn(count, self.latent, generator=generator)
        return torch.sigmoid(self.decoder(code.to(next(self.parameters()).device)))


def loss_function(logits, mean, log_variance, x):
    """Of a whole batch: how badly it is drawn again, and how far the code is from a standard normal one."""
    drawing = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp())
    return drawing + divergence


def train(model, device, loader, optimizer, epoch):
    model.train()
    total, seen = 0.0, 0
    for (x,) in loader:
        x = x.to(device)
        optimizer.zero_grad()
        loss = loss_function(*model(x), x)
        (loss / len(x)).backward()
        optimizer.step()
        total += loss.item()
        seen += len(x)
    print(f"epoch {epoch} train loss {total / seen:.4f}")


def test(model, device, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for (x,) in loader:
            x = x.to(device)
            total += loss_function(*model(x), x).item()
    print(f"test loss {total / len(loader.dataset):.4f}")
    return total / len(loader.dataset)


def save_samples(model, folder, epoch):
    """A sheet of 8 x 8 digits, drawn from the same codes each time."""
    model.eval()
    with torch.no_grad():
        digits = model.sample(64, torch.Generator().manual_seed(0)).cpu()
    sheet = digits.view(8, 8, 8, 8).permute(0, 2, 1, 3).reshape(64, 64)
    folder.mkdir(parents=True, exist_ok=True)
    if Image is None:
        torch.save(sheet, folder / f"samples_{epoch:03d}.pt")
    else:
        Image.fromarray((sheet * 255).byte().numpy()).save(folder / f"samples_{epoch:03d}.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/vae"), help="folder for the pictures")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train_images, test_images = train_test_split(images, test_size=0.25, random_state=0)
    train_loader = DataLoader(TensorDataset(train_images), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(test_images), batch_size=150)
    model = VAE().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs, eta_min=args.lr / 100)

    loss = test(model, device, test_loader)
    for epoch in range(1, args.epochs + 1):
        train(model, device, train_loader, optimizer, epoch)
        loss = test(model, device, test_loader)
        save_samples(model, args.out, epoch)
        scheduler.step()
    print(f"final loss {loss:.4f}")


if __name__ == "__main__":
    main()
