# SPDX-License-Identifier: Apache-2.0
"""Dense: every number as it is, 32 bits (64 for a float64 model).

    total = sum_i x_i,     sent_i = x_i,     bytes sent by one worker = 2 (N-1)/N * 4 n

n is the number of elements, N of workers; the factor is that of a ring all-reduce, and of the all-to-all and
all-gather of the reproducible route alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.codec.base import Exchange, State, Summing, Wire


class _DenseExchange:
    def __init__(self, x: Tensor, summing: Summing, state: State) -> None:
        self._x, self._summing, self._state = x, summing, state

    def finish(self) -> tuple[Tensor, Tensor, State]:
        # Nothing is lost on the wire, so error feedback has nothing to keep and `sent` need not be a copy.
        self._summing.wait()
        return self._x, self._x, self._state


@dataclass(frozen=True)
class Dense:
    """Full precision, no error."""

    def begin(self, x: Tensor, wire: Wire, state: State) -> Exchange:
        """Start the sum; see :class:`paceline.codec.base.Codec`."""
        return _DenseExchange(x, wire.sum(x), state)

    def bytes_sent(self, elements: int, workers: int) -> int:
        """2 (N-1)/N * 4 n."""
        return 2 * 4 * elements * (workers - 1) // workers

    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""
        return "dense, 32 bits a number"
