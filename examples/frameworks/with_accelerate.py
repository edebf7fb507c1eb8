# SPDX-License-Identifier: Apache-2.0
"""Digits with accelerate.

paceline run --workers 2 examples/frameworks/with_accelerate.py
"""

from __future__ import annotations

import torch
from digits import Digits, Net, accuracy
from torch.utils.data import DataLoader

from paceline.doors.adapters.accelerate import PacelineAccelerator


def main() -> float:
    """Train; the accuracy of the global model."""
    torch.manual_seed(0)
    accelerator = PacelineAccelerator("bmuf", period=8, accelerator={"cpu": True})  # instead of Accelerator(cpu=True)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Digits(True), 16, shuffle=True))
    for _ in range(4):
        for batch in accelerator.share(loader):  # the second line
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
    accelerator.end_training()
    found = accuracy(net)
    accelerator.print(f"{accelerator.run.world.size} workers read {found:.1%} of the test digits right")
    return found


if __name__ == "__main__":
    main()
