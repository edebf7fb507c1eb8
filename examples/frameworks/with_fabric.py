# SPDX-License-Identifier: Apache-2.0
"""Digits with Lightning's Fabric.

paceline run --workers 2 examples/frameworks/with_fabric.py
"""

from __future__ import annotations

import torch
from digits import Digits, Net, accuracy
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from paceline.doors.adapters.fabric import PacelineFabricStrategy


def main() -> float:
    """Train; the accuracy of the global model."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", strategy=PacelineFabricStrategy("bmuf", period=8))  # the first line
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(Digits(True), 16, shuffle=True))
    for _ in range(4):
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(model(**batch)["loss"])
            optimizer.step()
    fabric.strategy.close()  # the second
    found = accuracy(net)
    fabric.print(f"{fabric.world_size} workers read {found:.1%} of the test digits right")
    return found


if __name__ == "__main__":
    main()
