# SPDX-License-Identifier: Apache-2.0
"""1-bit SGD: the sign of every number, and two levels for every column.

    v = x + r                               r: the residual, what was not sent before
    b_m = [v_m >= 0]
    high = mean{v_m : b_m = 1},     low = mean{v_m : b_m = 0}           of each column; 0 for the mean of nothing
    Q(v)_m = high if b_m else low,  r <- v - Q(v)

The means are the best two levels for this split. Both directions of the exchange are quantised so, with feedback on
both sides (:mod:`paceline.rules.codec.two_sided`). Wire size of a column of c numbers: ceil(c/8) + 8 bytes.

What a column is. CNTK keeps matrices column by column; its columns are the weights that leave one input. Ours are the
*rows* of the layout, the weights that come into one output unit: these are contiguous in PyTorch, and in an embedding
they are a word, so that a word that did not occur keeps exactly 0 (both its levels are 0) instead of a share of the
words that did. Rows shorter than 64 are taken together, whole rows at a time, because 8 bytes of levels would outweigh
their bits; a vector is one column; a row longer than 65,536 is cut into columns of that length and a rest, which costs
one byte in a thousand and fits better.

Source: Seide, Fu, Droppo, Li & Yu, Interspeech 2014. Where we differ: the columns. Levels are float32, from float32
sums in the device's own order: workers agree because they use what came on the wire. Magnitudes above 1e33 may have
their means clamped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.rules.codec.bits import choose, not_negative, pack, unpack
from paceline.rules.codec.groups import columns
from paceline.rules.codec.layout import Layout, Matrix
from paceline.rules.codec.two_sided import LARGEST, TwoSided

SHORTEST, LONGEST = 64, 65_536


@dataclass(frozen=True)
class OneBit(TwoSided):
    """One bit a number, two levels a column.

    Attributes:
        feedback: error feedback, on the workers and on the owners; training without it rarely converges.
    """

    fused: ClassVar[bool] = True
    levels: ClassVar[int] = 2
    feedback: bool = True

    def groups(self, layout: Layout) -> tuple[Matrix, ...]:
        """Columns: the rows of the layout, at least 64 numbers and at most 65,536."""
        return columns(layout, SHORTEST, LONGEST)

    def code_bytes(self, length: int) -> int:
        """Eight numbers a byte."""
        return -(-length // 8)

    def write(self, x: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
        """b, high and low of the columns `x`, shape (R, C)."""
        bits = not_negative(x)
        codes.copy_(pack(bits))
        part = bits.float()  # the same memory for all three sums: it stays in the cache
        ones = part.sum(1)  # whole numbers below 2^24: exact in any order
        high = torch.clamp(x, min=0, out=part).sum(1)
        low = torch.clamp(x, max=0, out=part).sum(1)
        levels[:, 0] = high / ones.clamp(min=1)
        levels[:, 1] = low / (x.shape[1] - ones).clamp_(min=1)
        levels.clamp_(-LARGEST, LARGEST)
        return choose(bits, levels[:, :1], levels[:, 1:])

    def read(self, codes: Tensor, levels: Tensor, length: int) -> Tensor:
        """Q(v), shape (R, length)."""
        return choose(unpack(codes, length), levels[:, :1], levels[:, 1:])

    def encode_fused(self, x: Tensor, residual: Tensor | None, codes: Tensor, levels: Tensor) -> None:
        from paceline.core.kernels.codecs import encode_one_bit

        encode_one_bit(x, residual, codes, levels)

    def add_fused(self, total: Tensor, codes: Tensor, levels: Tensor) -> None:
        from paceline.core.kernels.codecs import add_one_bit

        add_one_bit(total, codes, levels)

    def describe(self, workers: int) -> str:
        return "1 bit a number, two levels a column" + (", error feedback" if self.feedback else "")
