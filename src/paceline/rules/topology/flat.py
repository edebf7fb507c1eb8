# SPDX-License-Identifier: Apache-2.0
"""Flat: the back end's own all-reduce, in a few chunks.

    total = sum_i x_i, in whatever order the back end adds

Two to four chunks in flight beat one large all-reduce by a third on links with delay, and let the outer arithmetic of
one chunk run while the next is on its way. Three are in flight here (:mod:`paceline.update.exchange.exchanger`); eight
in all, because the first has to be packed before anything moves and the last applied after everything has: at 1 Gbit/s
that cost 4 % of a synchronisation with four chunks and 3 % with eight. A model of less than 8 MiB has fewer, since each
message costs the processors. Each worker sends 2 (N-1)/N of the bytes.
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
class Flat(Checked):
    """All-reduce among all workers.

    Attributes:
        chunks: how many pieces a large exchange is cut into; each has 1 MiB at least.
    """

    checks: ClassVar = {"chunks": whole(1, most=64)}

    chunks: int = 8
    ordered: ClassVar[bool] = False

    def route(self, transport: Transport, operations: int) -> DirectRoute:
        """The route over `transport`."""
        transport.open_channels(1 + operations)
        return DirectRoute(transport, operations, ordered=False)

    def levels(self, hosts: Sequence[str]) -> tuple[Groups, ...]:
        """One dimension."""
        return ([list(range(len(hosts)))],)

    def bytes_sent(self, codec: Codec, layout: Layout, hosts: Sequence[str], rank: int) -> int:
        """What the codec sends among all workers."""
        return codec.bytes_sent(layout, len(hosts), rank)

    slow_bytes = bytes_sent

    def describe(self, workers: int) -> str:
        return f"flat all-reduce in up to {self.chunks} chunks"
