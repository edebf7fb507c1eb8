# SPDX-License-Identifier: Apache-2.0
"""What the processes of the tests of another number of workers run: save on some, go on on others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.checkpoint.test_reshard import Make, Quadratic, momentum_sgd
from tests.helpers import adam
from tests.processes.together import run_named

RULES: list[tuple[str, Make]] = [
    ("sync(reproducible=True)", momentum_sgd),
    ("one_bit(warmup=2)", momentum_sgd),
    ("bmuf_adam(period=3)", adam),
    ("bmuf(period=4, overlap=3, fragments=2)", momentum_sgd),
    ("asgd(overlap=0, piece=64)", adam),
    ("dc_asgd(kind='adaptive')", momentum_sgd),
    ("easgd(period=3)", adam),
]


def save(directory: Path) -> None:
    """Train, and save in the middle of a block."""
    for number, (rule, optimizer) in enumerate(RULES):
        Quadratic(rule, optimizer, save=directory / f"c{number}", settings={"timeout_s": 60})()


def resume(directory: Path) -> None:
    """Go on from there; what the global model was, and what this rank ends with."""
    worker = int(os.environ["RANK"])
    for number, (rule, optimizer) in enumerate(RULES):
        seen = Quadratic(rule, optimizer, 30, resume=directory / f"c{number}", settings={"timeout_s": 60})()
        save_file(seen.start, directory / f"start.{number}.{worker}.safetensors")
        save_file(seen.final, directory / f"final.{number}.{worker}.safetensors")
        save_file({"losses": torch.tensor(seen.losses)}, directory / f"losses.{number}.{worker}.safetensors")


if __name__ == "__main__":
    run_named(globals(), *sys.argv[1:])
