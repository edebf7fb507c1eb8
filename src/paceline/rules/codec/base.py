# SPDX-License-Identifier: Apache-2.0
"""The codec protocol.

A codec runs the whole exchange, because some cannot be split into encode, reduce and decode: 1-bit gathers, low rank
averages twice. `exchange(x, layout, wire, state)` is a generator: it starts an operation on the wire, yields it, and is
resumed when the operation is over. So an exchange reads like its equation, and callers can run it at once, in the
background, or many at a time. It returns `(total, state)`: the sum over the workers of what they sent, and the codec's
next state.

- Totals are sums; the caller divides by the weights.
- The exchange may change `x`. If `exact` is False, `x` ends as the unsent rest, x - sent_i; error feedback keeps that
  memory as the residual, and adds it to the next x: sent + residual = given.
- State is never changed in place: a caller that discards a total keeps the previous state, and nothing is lost.
- The result has the same bits on every worker.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from paceline.communication.base import Pending
from paceline.rules.codec.layout import Layout

State = dict[str, Tensor]
Result = TypeVar("Result")
Steps = Generator[Pending, None, Result]
"""Successive operations on the wire; each is yielded after its start, and the generator is resumed at its end."""


class Wire(Protocol):
    """A route among `size` workers, as one exchange sees it (:mod:`paceline.rules.topology`)."""

    @property
    def rank(self) -> int:
        """This worker's rank on the route."""

    @property
    def size(self) -> int:
        """Workers on the route."""

    def sum(self, x: Tensor) -> Steps[None]:
        """Sum `x` over the workers, in place, in the route's own order."""

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Pending:
        """Start: consecutive parts of `x`, uint8, of `in_sizes` bytes go to workers 0, 1, ..; `out` likewise gets
        `out_sizes[i]` bytes from worker i."""

    def space(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory of shape (elements,), valid until the exchange is over."""


class Codec(Protocol):
    """How a flat tensor is written on the wire."""

    @property
    def exact(self) -> bool:
        """Whether it is lossless, without anything to feed back."""

    @property
    def operations(self) -> int:
        """Number of successive operations of an exchange (a sum is one)."""

    @property
    def whole(self) -> bool:
        """Whether chunks must not cut a tensor (low rank)."""

    def at(self, number: int) -> Codec:
        """The codec of exchange `number` (the first is 0); another one during a warm-up."""

    def exchange(self, x: Tensor, layout: Layout, wire: Wire, state: State) -> Steps[tuple[Tensor, State]]:
        """Exchange `x`, shape (n,), float32 or float64, which `layout` describes; see above."""

    def bytes_sent(self, layout: Layout, workers: int, rank: int) -> int:
        """Bytes that worker `rank` of `workers` sends for one exchange."""

    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""
