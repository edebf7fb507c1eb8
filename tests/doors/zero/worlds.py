# SPDX-License-Identifier: Apache-2.0
"""Programs that know nothing of paceline, on virtual workers of this process, with zero lines around them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline.forecast.sim.simulate import run_script
from paceline_plugins.zero import virtual

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import SubsetRandomSampler

torch.manual_seed(0)

class Numbers(Dataset):
    "Sample k is k, with an input."
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, k):
        return k, torch.tensor([k / self.n, 1.0])

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = []  # of each pass, the numbers of its batches

def train(k, x):
    seen[-1].append(k.tolist())
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

def look(k, x):
    seen[-1].append(k.tolist())
    return model(x)
"""

EVALUATION = """
    model.eval()
    seen.append([])
    with torch.no_grad():
        for k, x in held_out:
            look(k, x)
"""
"""Ends the body of a loop over epochs."""


def run_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, workers: int = 2, rule: str = "averaging(period=2)"
) -> list[dict[str, Any]]:
    """The global names of a program, of each worker, in rank order."""
    script = folder / "train.py"
    script.write_text(HEAD + textwrap.dedent(source))
    monkeypatch.setenv("PACELINE_RULE", rule)
    with virtual.VirtualZeroLines(script, folder / "logs", random_data=False) as around:
        return list(run_script(script, workers, [], around.worker))


def passes(found: list[dict[str, Any]]) -> list[list[list[list[int]]]]:
    """What each worker saw: found[worker][pass] = batches."""
    return [one["seen"] for one in found]


def samples(batches: list[list[int]]) -> list[int]:
    """The samples of some batches."""
    return [k for batch in batches for k in batch]
