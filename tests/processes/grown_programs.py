# SPDX-License-Identifier: Apache-2.0
"""A training whose number of workers grows under a launcher of a fixed number: each worker writes what it was given.

python -m tests.processes.grown_programs NAME DIRECTORY RULE [RANK_THAT_FAILS]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

SAMPLES, BATCH, EPOCHS = 402, 4, 2


def main(directory: Path, rule: str, fails: int) -> None:
    """Train, and write the samples and the numbers of workers of each step."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0)), torch.arange(SAMPLES))
    run = paceline.attach(model, optimizer, rule, timeout_s=30)
    share = run.share(DataLoader(data, batch_size=BATCH, shuffle=True))
    seen: list[list[int]] = []
    sizes: list[int] = []
    with run:
        for _ in range(run.epoch, EPOCHS):
            for inputs, numbers in share:
                optimizer.zero_grad()
                (model(inputs) - 1).square().mean().backward()
                optimizer.step()
                seen.append(numbers.tolist())
                sizes.append(run.world.size)
                if rank == fails and len(seen) == 9:
                    raise ArithmeticError("the user's own")
    save_file(model.state_dict(), directory / f"model.{rank}.safetensors")
    (directory / f"seen.{rank}").write_text(json.dumps([seen, sizes, run.world.rank]))


if __name__ == "__main__":
    main(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else -1)
