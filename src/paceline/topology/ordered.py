# SPDX-License-Identifier: Apache-2.0
"""Ordered: the reproducible route, whose bits depend on nothing but what the workers bring.

    all-to-all:   worker k receives slice k of every x_i
    sum:          s_k = (...((x_0k + x_1k) + x_2k) + ...) + x_{N-1,k}        in rank order, on the slice's owner
    all-gather:   everybody receives s_0 .. s_{N-1}

Addition of floating-point numbers is not associative; here its order is fixed, so back end, chunking and transport do
not show in the result, and virtual workers give the bits of real processes. The bytes are those of a ring all-reduce,
2 (N-1)/N; on one machine it costs about twice gloo's all-reduce, because memory is passed over more often.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import RuleError
from paceline.transport.base import Transport


class _OrderedSum:
    """The three phases; the first is under way when this is made."""

    def __init__(self, x: Tensor, transport: Transport) -> None:
        size = transport.world.size
        slice_elements = -(-x.numel() // size)
        self._x, self._transport = x, transport
        self._rows = torch.zeros(size, slice_elements, dtype=x.dtype, device=x.device)
        self._rows.view(-1)[: x.numel()].copy_(x)
        self._arrived = torch.empty_like(self._rows)
        self._pending = transport.all_to_all(self._arrived, self._rows)

    def wait(self) -> None:
        self._pending.wait()
        total = self._arrived[0].clone()
        for row in self._arrived[1:]:
            total.add_(row)
        self._transport.all_gather(self._rows, total).wait()
        self._x.copy_(self._rows.view(-1)[: self._x.numel()])


@dataclass(frozen=True)
class OrderedWire:
    """The route bound to a transport."""

    transport: Transport

    def sum(self, x: Tensor) -> _OrderedSum:
        """Start to sum `x` over the workers, in place."""
        return _OrderedSum(x, self.transport)


@dataclass(frozen=True)
class Ordered:
    """All-to-all, sum in rank order on the slice's owner, all-gather.

    Attributes:
        chunks: how many pieces a large exchange is cut into; the result does not depend on it.
    """

    chunks: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.chunks, int) or not 1 <= self.chunks <= 64:
            raise RuleError(f"chunks must be a whole number from 1 to 64, got {self.chunks!r}")

    def wire(self, transport: Transport) -> OrderedWire:
        """The route over `transport`."""
        return OrderedWire(transport)

    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""
        return "flat, summed in rank order (reproducible bits)"
