# SPDX-License-Identifier: Apache-2.0
"""What a codec is.

The codec owns the exchange, because some cannot be cut into encode, reduce and decode: 1-bit has to gather, low rank
averages twice. `begin(x, wire, state)` starts the exchange of this worker's `x`; `finish()` returns
`(total, sent, state)`: the sum over the workers of what they sent, what this worker sent (error feedback keeps
`x - sent`), and the codec's state for the next time. Totals are sums; the caller divides by the weights.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

State = dict[str, Tensor]


class Wire(Protocol):
    """A route over which tensors are summed (:mod:`paceline.topology`)."""

    def sum(self, x: Tensor) -> Summing:
        """Start to sum `x` over the workers, in place."""


class Summing(Protocol):
    """A sum under way."""

    def wait(self) -> None:
        """Return when `x` holds the sum."""


class Exchange(Protocol):
    """An exchange under way."""

    def finish(self) -> tuple[Tensor, Tensor, State]:
        """(total, sent, state), each tensor of the shape of `x`; waits for the others."""


class Codec(Protocol):
    """How a flat tensor is written on the wire."""

    def begin(self, x: Tensor, wire: Wire, state: State) -> Exchange:
        """Start the exchange of `x`, shape (n,); `x` belongs to the exchange until it is finished."""

    def bytes_sent(self, elements: int, workers: int) -> int:
        """Bytes that one worker sends for `elements` numbers of 32 bits."""

    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""
