# SPDX-License-Identifier: Apache-2.0
"""The topology protocol.

`route` binds a topology to a connection. A route runs whole exchanges, because some show the codec only a part: the
hierarchical one sums densely where the network is fast, and gives the codec a slice for the slow dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from paceline.communication.base import Pending, Transport
from paceline.core.parse import Checked, whole
from paceline.rules.codec.base import Codec, State, Steps
from paceline.rules.codec.layout import Layout

Groups = list[list[int]]
"""Ranks that exchange with one another, along one dimension."""


class Route(Protocol):
    """A topology bound to a connection."""

    @property
    def stages(self) -> int:
        """The largest number of successive operations of an exchange."""

    def exchange(self, codec: Codec, x: Tensor, layout: Layout, state: State) -> Steps[tuple[Tensor, State]]:
        """Sum `x`, shape (n,), over all workers, as `codec` writes it: see :class:`paceline.rules.codec.base.Codec`."""


class Topology(Protocol):
    """Over which route tensors are summed: flat, in rank order, or hierarchical; a value."""

    def __hash__(self) -> int: ...

    @property
    def chunks(self) -> int:
        """Number of chunks of a large exchange."""

    @property
    def ordered(self) -> bool:
        """Whether sums over the slowest dimension are in rank order."""

    def route(self, transport: Transport, operations: int) -> Route:
        """The route over `transport`, for codecs of at most that many `operations`; every worker calls it."""

    def levels(self, hosts: Sequence[str]) -> tuple[Groups, ...]:
        """For each dimension, the slowest last, groups that cover all ranks."""

    def bytes_sent(self, codec: Codec, layout: Layout, hosts: Sequence[str], rank: int) -> int:
        """Bytes that `rank` sends for one exchange; `hosts` names each worker's host in rank order."""

    def slow_bytes(self, codec: Codec, layout: Layout, hosts: Sequence[str], rank: int) -> int:
        """The part of `bytes_sent` along the slowest dimension; all of it where there is one dimension only."""

    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""


class DirectWire:
    """All workers of a transport, for one exchange; each of its operations has its own channel.

    Args:
        transport: the connection.
        ordered: whether to sum in rank order, instead of in the back end's own.
    """

    def __init__(self, transport: Transport, ordered: bool) -> None:
        self.transport, self._ordered, self._started = transport, ordered, 0
        self.rank, self.size = transport.world.rank, transport.world.size

    def channel(self) -> Transport:
        """The connection for the next operation, which must not queue behind the previous one.

        Channel 0 carries headers and other messages.
        """
        self._started += 1
        return self.transport.channel(self._started)

    def sum(self, x: Tensor) -> Steps[None]:
        """The back end's all-reduce, or all-to-all, sum in rank order, all-gather."""
        if self._ordered:
            yield from sum_in_rank_order(self, x)
        else:
            yield self.channel().all_reduce(x)

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Pending:
        """Start to send parts of `x`; see :class:`paceline.rules.codec.base.Wire`."""
        return self.channel().all_to_all(out, x, out_sizes, in_sizes)

    def space(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the time of the exchange."""
        return torch.empty(elements, dtype=dtype, device=device)


def sum_in_rank_order(wire: DirectWire, x: Tensor) -> Steps[None]:
    """Sum `x` over the workers of `wire`, in place: all-to-all, sum in rank order on the slice's owner, all-gather."""
    rows = torch.zeros(wire.size, -(-x.numel() // wire.size), dtype=x.dtype, device=x.device)
    rows.view(-1)[: x.numel()].copy_(x)
    arrived = torch.empty_like(rows)
    yield wire.channel().all_to_all(arrived, rows)
    total = arrived[0].clone()
    for row in arrived[1:]:
        total.add_(row)
    yield wire.channel().all_gather(rows, total)
    x.copy_(rows.view(-1)[: x.numel()])


@dataclass(frozen=True)
class DirectRoute:
    """All workers of a transport exchange with one another; `stages` operations follow one another in an exchange."""

    transport: Transport
    stages: int
    ordered: bool

    def exchange(self, codec: Codec, x: Tensor, layout: Layout, state: State) -> Steps[tuple[Tensor, State]]:
        """Sum `x` over the workers."""
        return codec.exchange(x, layout, DirectWire(self.transport, self.ordered), state)


@dataclass(frozen=True)
class Direct(Checked):
    """A topology of one dimension: all workers exchange with one another.

    Attributes:
        chunks: how many pieces a large exchange is cut into; each has 1 MiB at least.
    """

    checks: ClassVar = {"chunks": whole(1, most=64)}
    ordered: ClassVar[bool]

    chunks: int = 8

    def route(self, transport: Transport, operations: int) -> DirectRoute:
        stages = operations * (2 if self.ordered else 1)
        transport.open_channels(1 + stages)
        return DirectRoute(transport, stages, self.ordered)

    def levels(self, hosts: Sequence[str]) -> tuple[Groups, ...]:
        return ([list(range(len(hosts)))],)

    def bytes_sent(self, codec: Codec, layout: Layout, hosts: Sequence[str], rank: int) -> int:
        """What the codec sends among all workers."""
        return codec.bytes_sent(layout, len(hosts), rank)

    slow_bytes = bytes_sent
