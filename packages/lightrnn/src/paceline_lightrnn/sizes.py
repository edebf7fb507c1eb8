# SPDX-License-Identifier: Apache-2.0
"""The size of a model before it is built, and the available memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from paceline_lightrnn.state import make_recurrent


class Sizes(NamedTuple):
    """Bytes of a model's parameters.

    Attributes:
        input: of the input vectors.
        output: of the output's vectors and biases; biases only if tied.
        recurrent: of the recurrent network.
    """

    input: int
    output: int
    recurrent: int

    @property
    def total(self) -> int:
        """Of all parameters."""
        return self.input + self.output + self.recurrent

    @property
    def vectors(self) -> int:
        """Of everything that grows with the vocabulary."""
        return self.input + self.output


def light_sizes(words: int, dimension: int, *, layers: int = 1, cell: str = "lstm", tied: bool = False) -> Sizes:
    """The size of a LightRNN with a table as square as possible, without allocating its vectors."""
    columns = math.isqrt(words - 1) + 1
    lines = -(-words // columns) + columns
    with torch.device("meta"):
        recurrent = make_recurrent(cell, dimension, layers, 0.0)
    number = torch.get_default_dtype().itemsize
    vectors = lines * dimension * number
    biases = lines * number
    return Sizes(vectors, biases + (0 if tied else vectors), _bytes(recurrent))


def sizes_of(model: nn.Module) -> Sizes:
    """The sizes of an existing model; a tensor with two names counts under its first."""
    found = {"input": 0, "output": 0, "recurrent": 0}
    for name, parameter in model.named_parameters():
        place = "recurrent" if name.startswith("recurrent") else "input" if name.endswith("_in") else "output"
        found[place] += parameter.numel() * parameter.element_size()
    return Sizes(**found)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Free memory of the device, bytes; None if unknown.

    On the CPU the minimum of the system's available memory and the rest of the control group's limit.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    rooms = [room for room in (_of_the_system(), _of_the_group()) if room is not None]
    return min(rooms) if rooms else None


def _of_the_system(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _of_the_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # no control groups, or "max": no limit
        return None
    used = [int(line.split()[1]) for line in lines if line.startswith("anon ")]  # page cache can be reclaimed
    return max(0, limit - sum(used))
