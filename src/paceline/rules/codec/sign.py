# SPDX-License-Identifier: Apache-2.0
"""Sign: the sign of every number, and one scale for every column.

    Q(v)_m = (|v|_1 / d) sign(v_m),     sign(0) = +1,     d numbers in the column

    |v - Q(v)|^2 = |v|^2 - |v|_1^2 / d <= |v|^2            so that error feedback converges

The scale |v|_2 / sqrt(d) of 1-bit Adam is not taken: it keeps the norm, but is no contraction, |v - Q(v)|^2 = 2 |v|^2
(1 - |v|_1 / (sqrt(d) |v|_2)), 1.8 |v|^2 for one number among a hundred zeros. Both are the same for Gaussian numbers.

A column is a row of the layout, of 64 to 65,536 numbers as for 1-bit (there the reasons are), not a matrix: a row that
is always zero, a word that did not occur, has scale 0 and stays exactly zero, where a matrix's scale would leak into
it. A zero among others is sent as +scale; feedback takes that back. Wire size of a column of c numbers: ceil(c/8) + 4
bytes.

Source: Karimireddy et al., ICML 2019 (EF-signSGD, arXiv 1901.09847). Where we differ: both directions are quantised
(:mod:`paceline.rules.codec.two_sided`).
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
class Sign(TwoSided):
    """One bit a number, one scale a column.

    Attributes:
        feedback: error feedback, on the workers and on the owners.
    """

    levels: ClassVar[int] = 1
    feedback: bool = True

    def groups(self, layout: Layout) -> tuple[Matrix, ...]:
        """Columns: the rows of the layout, at least 64 numbers and at most 65,536."""
        return columns(layout, SHORTEST, LONGEST)

    def code_bytes(self, length: int) -> int:
        """Eight numbers a byte."""
        return -(-length // 8)

    def write(self, x: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
        """Signs and scales of the columns `x`, shape (R, C)."""
        bits = not_negative(x)
        codes.copy_(pack(bits))
        torch.div(x.abs().sum(1, keepdim=True), x.shape[1], out=levels).clamp_(max=LARGEST)
        return choose(bits, levels, -levels)

    def read(self, codes: Tensor, levels: Tensor, length: int) -> Tensor:
        """Q(v), shape (R, length)."""
        return choose(unpack(codes, length), levels, -levels)

    def describe(self, workers: int) -> str:
        return "1 bit a number, one scale a column" + (", error feedback" if self.feedback else "")
