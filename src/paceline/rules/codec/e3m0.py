# SPDX-License-Identifier: Apache-2.0
"""E3M0: four bits a number: a sign, three bits of exponent, no mantissa.

    s = 2^k, the power of two nearest to max_m |v_m|        of each block of 256 consecutive numbers of a tensor
    code c = 1..7 means 2^(c-7) s, code 0 for zero;  the sign is the fourth bit
    Q(v)_m = sign(v_m) 2^(c_m - 7) s,   the power of two nearest to |v_m|; less than 3/4 of the smallest (2^-6 s) is 0

"Nearest" is by difference: from 1.5 times a power of two on, the next one is taken. Every number is sent with an error
of at most its own size, so the quantiser contracts. Two numbers a byte, the first in the low half. Wire size of a block
of c numbers: ceil(c/2) + 4 bytes, 4.125 bits a number. Both directions are quantised so, sums are float32
(:mod:`paceline.rules.codec.two_sided`).

Source: Douillard et al., Streaming DiLoCo, arXiv 2501.18512, which names the format and accumulates in float32. The
text fixes neither the scale nor what code 0 is: blocks, power-of-two scales and a zero are our choice, and so is error
feedback. s is never below 2^-119, so that numbers below 2^-126 are written as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.rules.codec.bits import look_up
from paceline.rules.codec.groups import blocks
from paceline.rules.codec.layout import Layout, Matrix
from paceline.rules.codec.two_sided import TwoSided

BLOCK = 256
_ABSOLUTE, _HALF_MANTISSA, _EXPONENT_AT = 0x7FFF_FFFF, 0x40_0000, 23  # of a float32 as a 32-bit integer
_CODES = [0.0] + [2.0 ** (c - 7) for c in range(1, 8)]
_CODES += [-value for value in _CODES]
_PAIRS = torch.tensor([[_CODES[byte & 15], _CODES[byte >> 4]] for byte in range(256)])  # (256, 2)


@dataclass(frozen=True)
class E3M0(TwoSided):
    """Four bits a number, a scale a block of 256.

    Attributes:
        feedback: error feedback, on the workers and on the owners.
    """

    levels: ClassVar[int] = 1
    feedback: bool = True

    def groups(self, layout: Layout) -> tuple[Matrix, ...]:
        """Blocks of 256 numbers of a tensor."""
        return blocks(layout, BLOCK)

    def code_bytes(self, length: int) -> int:
        """Two numbers a byte."""
        return -(-length // 2)

    def write(self, x: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
        """c and s of the blocks `x`, shape (R, C)."""
        bits = x.view(torch.int32)
        exponent = (bits & _ABSOLUTE).add_(_HALF_MANTISSA).bitwise_right_shift_(_EXPONENT_AT)
        largest = exponent.amax(1, keepdim=True).clamp_(8, 254)
        levels.copy_((largest << _EXPONENT_AT).view(torch.float32))
        code = exponent.sub_(largest - 7).clamp_(0, 7).bitwise_or_((bits >> 28).bitwise_and_(8)).to(torch.uint8)
        if code.shape[1] % 2:
            code = torch.nn.functional.pad(code, (0, 1))
        pair = code.view(torch.int16)  # first number in the low byte
        codes.copy_((pair >> 4).bitwise_or_(pair).bitwise_and_(255))
        return self.read(codes, levels, x.shape[1])

    def read(self, codes: Tensor, levels: Tensor, length: int) -> Tensor:
        """Q(v), shape (R, length)."""
        return look_up(_PAIRS, codes)[:, :length] * levels

    def describe(self, workers: int) -> str:
        return f"4 bits a number (E3M0), a scale for {BLOCK}" + (", error feedback" if self.feedback else "")
