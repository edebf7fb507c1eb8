# SPDX-License-Identifier: Apache-2.0
"""What the programs of the storm have in common: the samples, the learning rate, the file that a worker writes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from model import CONTEXT
from torch import Tensor
from torch.utils.data import Dataset

from _faults.job import Job
from data import Chunks


class Samples(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """So many chunks of the text, drawn by the seed; item i is (i, inputs, targets)."""

    def __init__(self, text: Tensor, job: Job) -> None:
        self.chunks, self.count = Chunks(text, job.length, CONTEXT), job.samples
        if self.count > len(self.chunks):
            raise SystemExit(
                f"the text has {len(self.chunks):,} samples, {self.count:,} are wanted; train for less long"
            )
        self.drawn = torch.randperm(len(self.chunks), generator=torch.Generator().manual_seed(job.seed))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor(index), *self.chunks[int(self.drawn[index])]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """A whole minibatch at once."""
        return torch.tensor(indices), *self.chunks.__getitems__(self.drawn[indices].tolist())


def learning_rate(share_done: float) -> float:
    """Part of the highest rate: up over the first 5 %, level to 40 %, then down to 1 %."""
    if share_done < 0.4:
        return min(1.0, (share_done + 0.001) / 0.05)
    return 0.01 + 0.99 * (1.0 - share_done) / 0.6


class Book:
    """A worker's file: one JSON object a line, each with `event` and `at`, seconds of the wall clock."""

    def __init__(self, directory: Path, worker: int) -> None:
        self.directory, self.worker = directory, worker
        self._file = (directory / f"worker-{worker:03d}.jsonl").open("a", buffering=1)

    def write(self, event: str, **fields: Any) -> None:
        """A line; it outlives this process as soon as this returns."""
        self._file.write(json.dumps({"event": event, "at": round(time.time(), 5), **fields}) + "\n")

    def asked(self, what: str) -> bool:
        """Whether a file asks this worker for something, once."""
        path = self.directory / f"{what}-{self.worker}"
        if not path.exists():
            return False
        path.rename(path.with_name(f"{path.name}.done"))
        return True
