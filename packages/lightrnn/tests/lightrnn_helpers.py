# SPDX-License-Identifier: Apache-2.0
"""What several tests of this package need: bits to compare, virtual workers from one seed, and real workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paceline

State = dict[str, Tensor]
DEADLINE_S = 150.0


def state_of(model: nn.Module) -> State:
    """A copy of the model's state."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_bits(one: State, other: State) -> bool:
    """Whether two states hold the same names and the same bits (nan equal to nan)."""
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        for a, b in ((one[name].contiguous(), other[name].contiguous()) for name in one)
    )


def simulate(target: Callable[[], Any], workers: int) -> list[Any]:
    """`paceline.simulate` from a known state of the generators."""
    torch.manual_seed(5)
    return list(paceline.simulate(target, workers))


def on_real_workers(program: str, workers: int, folder: Path) -> list[Any]:
    """What each rank of `paceline run` wrote into rank-R.json; the program is a file beside this one.

    The program is given the folder.
    """
    path = Path(__file__).with_name(program)
    command = [sys.executable, "-m", "paceline", "run", "--workers", str(workers), "--log", str(folder / "log")]
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(path), str(folder)],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(workers)]
