# SPDX-License-Identifier: Apache-2.0
"""The program of docs/guide/start.md; `failing` ends it at step 200 of each worker."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

how, epochs = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
library = Path(os.__file__).parent  # Python's own library is the text to learn
text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:100_000]
characters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=127)
windows = characters.unfold(0, 9, 1)  # eight characters, and the one that follows
train, held_out = windows[:-10_000], windows[-10_000:]

data = TensorDataset(train[:, :8], train[:, 8])
loader = DataLoader(data, batch_size=64, shuffle=True)
model = nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
step = 0

for epoch in range(epochs):
    for before, following in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(before), following)
        loss.backward()
        optimizer.step()
        step += 1
        if how == "failing" and step == 200:
            model(before.float())
    model.eval()
    with torch.no_grad():
        held = nn.functional.cross_entropy(model(held_out[:, :8]), held_out[:, 8])
    model.train()
    print(f"epoch {epoch}: held-out loss {held:.3f}", flush=True)
torch.save(model.state_dict(), "model.pt")
