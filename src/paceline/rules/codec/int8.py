# SPDX-License-Identifier: Apache-2.0
"""8-bit integers with a scale for every block.

    s = max_m |v_m| / 127                   of each block of 256 consecutive numbers of a tensor
    q_m = round(v_m / s),  Q(v)_m = s q_m   to the nearest, ties to even; a block of zeros has s = 0 and stays zero

|v_m - Q(v)_m| <= s/2. Wire size of a block of c numbers: c + 4 bytes, 8.125 bits a number. Both directions of the
exchange are quantised so (:mod:`paceline.rules.codec.two_sided`).

Source: block-wise quantisation is common knowledge (Dettmers et al., arXiv 2110.02861, have it with codes that are not
linear); error feedback as in Seide et al. 2014.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.rules.codec.groups import blocks
from paceline.rules.codec.layout import Layout, Matrix
from paceline.rules.codec.two_sided import LARGEST, TwoSided

BLOCK = 256


@dataclass(frozen=True)
class Int8(TwoSided):
    """A byte a number, a scale a block of 256.

    Attributes:
        feedback: error feedback, on the workers and on the owners.
    """

    fused: ClassVar[bool] = True
    levels: ClassVar[int] = 1
    feedback: bool = True

    def groups(self, layout: Layout) -> tuple[Matrix, ...]:
        """Blocks of 256 numbers of a tensor."""
        return blocks(layout, BLOCK)

    def code_bytes(self, length: int) -> int:
        """One byte a number."""
        return length

    def write(self, x: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
        """q and s of the blocks `x`, shape (R, C)."""
        torch.div(x.abs().amax(1, keepdim=True), 127, out=levels).clamp_(max=LARGEST / 128)
        divisor = levels.masked_fill(levels == 0, 1)
        q = torch.div(x, divisor).round_().clamp_(-127, 127)
        codes.view(torch.int8).copy_(q)
        return q.mul_(levels)

    def read(self, codes: Tensor, levels: Tensor, length: int) -> Tensor:
        """s q, shape (R, length)."""
        return codes.view(torch.int8).float().mul_(levels)

    def encode_fused(self, x: Tensor, residual: Tensor | None, codes: Tensor, levels: Tensor) -> None:
        from paceline.core.kernels.codecs import encode_int8

        encode_int8(x, residual, codes, levels)

    def add_fused(self, total: Tensor, codes: Tensor, levels: Tensor) -> None:
        from paceline.core.kernels.codecs import add_int8

        add_int8(total, codes, levels)

    def describe(self, workers: int) -> str:
        return f"8 bits a number, a scale for {BLOCK}" + (", error feedback" if self.feedback else "")
