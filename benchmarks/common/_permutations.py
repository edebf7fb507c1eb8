# SPDX-License-Identifier: Apache-2.0
"""The order in which a benchmark's samples are drawn."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def pieces(count: int, at_once: int, seed: int) -> Iterator[Tensor]:
    """Pieces, int32 (at_once,), of one permutation of 0 .. count - 1 after another, without end."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.int32)
    while True:
        while len(left) < at_once:
            left = torch.cat([left, torch.randperm(count, generator=generator, dtype=torch.int32)])
        piece, left = left[:at_once], left[at_once:]
        yield piece
