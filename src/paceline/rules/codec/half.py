# SPDX-License-Identifier: Apache-2.0
"""Half precision: 16 bits a number, bfloat16 or float16.

    Q(v)_m = v_m rounded to the nearest number of the format, ties to even, at most its largest finite one

Sums are float32: both directions of the exchange are rounded, nothing is added in 16 bits
(:mod:`paceline.rules.codec.two_sided`). Numbers above float16's 65,504 are clamped to it instead of becoming inf, and
numbers below its 6e-8 become 0; with feedback the rest stays in the residual and follows. bfloat16 has the range of
float32. Wire size: 2 bytes a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.core.parse import check
from paceline.rules.codec.groups import blocks
from paceline.rules.codec.layout import Layout, Matrix
from paceline.rules.codec.two_sided import TwoSided

_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PIECE = 1 << 15


@dataclass(frozen=True)
class Half(TwoSided):
    """Two bytes a number.

    Attributes:
        kind: "bf16" or "fp16".
        feedback: error feedback, on the workers and on the owners.
    """

    levels: ClassVar[int] = 0
    kind: str = "bf16"
    feedback: bool = True

    def __post_init__(self) -> None:
        TwoSided.__post_init__(self)
        check(self.kind in _FORMATS, "kind", f"one of {', '.join(_FORMATS)}", self.kind)

    def groups(self, layout: Layout) -> tuple[Matrix, ...]:
        """There are no levels; groups are what is converted at a time."""
        return blocks(Layout.vector(layout.numel), _PIECE)

    def code_bytes(self, length: int) -> int:
        """Two bytes a number."""
        return 2 * length

    def write(self, x: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
        """`x`, shape (R, C), rounded."""
        largest = torch.finfo(_FORMATS[self.kind]).max
        rounded = x.clamp(-largest, largest).to(_FORMATS[self.kind])
        codes.copy_(rounded.view(torch.uint8))
        return rounded.float()

    def read(self, codes: Tensor, levels: Tensor, length: int) -> Tensor:
        """The numbers, shape (R, length)."""
        return codes.clone().view(_FORMATS[self.kind]).float()

    def describe(self, workers: int) -> str:
        return f"16 bits a number ({self.kind}), sums in float32" + (", error feedback" if self.feedback else "")
