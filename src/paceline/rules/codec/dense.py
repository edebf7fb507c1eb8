# SPDX-License-Identifier: Apache-2.0
"""Dense: every number as it is, 32 bits (64 for a float64 model).

    total = sum_i x_i,     sent_i = x_i,     bytes sent by one worker = 2 (N-1)/N * 4 n

n is the number of elements, N of workers; the factor is that of a ring all-reduce, and of the all-to-all and
all-gather of the reproducible route alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.rules.codec.base import State, Steps, Wire
from paceline.rules.codec.layout import Layout


@dataclass(frozen=True)
class Dense:
    """Full precision, no error."""

    exact = True
    operations = 1
    whole = False

    def at(self, number: int) -> Dense:
        return self

    def exchange(self, x: Tensor, layout: Layout, wire: Wire, state: State) -> Steps[tuple[Tensor, State]]:
        """The sum, in the memory of `x`; see :class:`paceline.rules.codec.base.Codec`."""
        yield from wire.sum(x)
        return x, state

    def bytes_sent(self, layout: Layout, workers: int, rank: int) -> int:
        """2 (N-1)/N * 4 n."""
        return 2 * 4 * layout.numel * (workers - 1) // workers

    def describe(self, workers: int) -> str:
        return "dense, 32 bits a number"
