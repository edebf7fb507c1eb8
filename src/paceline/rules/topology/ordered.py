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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.communication.base import Transport
from paceline.core.parse import Checked, whole
from paceline.rules.codec.base import Codec
from paceline.rules.codec.layout import Layout
from paceline.rules.topology.base import DirectRoute, Groups


@dataclass(frozen=True)
class Ordered(Checked):
    """All-to-all, sum in rank order on the slice's owner, all-gather.

    Attributes:
        chunks: how many pieces a large exchange is cut into (of 1 MiB at least); the result does not depend on it.
    """

    checks: ClassVar = {"chunks": whole(1, most=64)}

    chunks: int = 8
    ordered: ClassVar[bool] = True

    def route(self, transport: Transport, operations: int) -> DirectRoute:
        """The route over `transport`."""
        transport.open_channels(1 + 2 * operations)
        return DirectRoute(transport, 2 * operations, ordered=True)

    def levels(self, hosts: Sequence[str]) -> tuple[Groups, ...]:
        """One dimension."""
        return ([list(range(len(hosts)))],)

    def bytes_sent(self, codec: Codec, layout: Layout, hosts: Sequence[str], rank: int) -> int:
        """What the codec sends among all workers."""
        return codec.bytes_sent(layout, len(hosts), rank)

    slow_bytes = bytes_sent

    def describe(self, workers: int) -> str:
        return "flat, summed in rank order (reproducible bits)"
