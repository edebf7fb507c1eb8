# SPDX-License-Identifier: Apache-2.0
"""A small convolution that guesses the next character of Python's standard library, trained on one device."""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED, EPOCHS, BATCH, RATE, LENGTH = 1, 3, 16, 0.05, 64


class Model(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=2**k) for k in range(3))
        self.output = nn.Linear(width, 128)

    def forward(self, characters):
        x = self.embedding(characters).transpose(1, 2)
        for layer in self.layers:  # from the left only, so that no place sees what it has to guess
            x = x + torch.relu(layer(nn.functional.pad(x, (2 * layer.dilation[0], 0))))
        return self.output(x.transpose(1, 2))


def load_data():
    """Pieces of the library's modules: the last tenth is held out."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))[:16]
    text = torch.tensor([byte for path in paths for byte in path.read_bytes() if byte < 128])
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    held_out = len(pieces) // 10
    return TensorDataset(pieces[:-held_out]), TensorDataset(pieces[-held_out:])


def loss_of(model, pieces):
    scores = model(pieces[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    return sum(loss_of(model, pieces).item() * len(pieces) for (pieces,) in loader) / len(loader.dataset)


def main():
    torch.manual_seed(SEED)
    train_data, held_out_data = load_data()
    train_loader = DataLoader(train_data, batch_size=BATCH, shuffle=True)
    held_out_loader = DataLoader(held_out_data, batch_size=256)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        model.train()
        for (pieces,) in train_loader:
            optimizer.zero_grad()
            loss_of(model, pieces).backward()
            optimizer.step()
        loss = evaluate(model, held_out_loader)
        print(f"epoch {epoch + 1}: held-out loss {loss:.4f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
