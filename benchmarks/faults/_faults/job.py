# SPDX-License-Identifier: Apache-2.0
"""What one training of the benchmark is, as JSON that its workers read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

LAPS, PLACES = 8, 256
"""Of the buffer that tells who took part in an exchange: exchanges, and workers."""


@dataclass
class Job:
    """A training.

    Attributes:
        books: directory in which each worker writes down what it does, and looks for what is asked of it.
        corpus: safetensors file with the text.
        rule: of the run.
        minibatches: of all workers together; each sample of them is to enter the model exactly once.
        batch, length: sequences of a minibatch, characters of a sequence that count.
        hidden: of the LSTM; 256 makes 325,000 parameters, 500 a million.
        lr: highest learning rate.
        minibatch_s: that a minibatch takes at least: a sleep stands for a device that is slower than this processor.
        timeout_s: of the run.
        seed: of model and data.
        checkpoint: directory of steps, empty for none.
        every_blocks: from one step to the next.
    """

    books: str
    corpus: str
    rule: str = "bmuf(period=16)"
    minibatches: int = 1000
    batch: int = 8
    length: int = 16
    hidden: int = 256
    lr: float = 4.0
    minibatch_s: float = 0.15
    timeout_s: float = 20.0
    seed: int = 0
    checkpoint: str = ""
    every_blocks: int = 5

    @property
    def samples(self) -> int:
        """Of the whole training."""
        return self.minibatches * self.batch

    @property
    def period(self) -> int:
        """Minibatches of a block."""
        return int(self.rule.split("period=")[1].split(")")[0].split(",")[0])

    def write(self, path: Path) -> Path:
        """Leave it where the workers read it."""
        path.write_text(json.dumps(asdict(self), indent=1))
        return path


def read(path: Path) -> Job:
    """The job that stands in a file."""
    return Job(**json.loads(path.read_text()))
