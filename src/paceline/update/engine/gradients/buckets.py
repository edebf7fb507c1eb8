# SPDX-License-Identifier: Apache-2.0
"""The gradient buckets of an optimizer, laid out in the order in which gradients become ready."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

from paceline.communication import Transport
from paceline.core.flat import fragments
from paceline.core.optimizer_state import Named
from paceline.rules.codec import Codec
from paceline.update.engine.blocks.buffers import BufferState
from paceline.update.engine.blocks.chunks import OuterStateChunk, cut
from paceline.update.engine.blocks.numbers import PlainMean
from paceline.update.engine.gradients.bucket import GradientBucket, GradientChunk
from paceline.update.engine.gradients.payloads import PayloadReader
from paceline.update.exchange.checksum import combine, of_tensors
from paceline.update.exchange.header import ExchangeSummary


class GradientBuckets:
    """A bucket for each dtype and device, cut into chunks, and the buffers that are exchanged with them.

    Args:
        named: the parameters.
        buffers: the outer states of the buffers.
        codec: the codec of the chunks.
        chunks: the approximate number of chunks.
        transport: the connection.
        norms: whether norms are taken.

    Attributes:
        order: the parameters' numbers in the order of the layout; empty before `build`.
        chunks: in the order in which their last gradients become ready.
        chunks_of: of each parameter, the numbers of the chunks that hold its gradient.
        place: of each parameter, its bucket and its number there.
    """

    def __init__(
        self,
        named: Named,
        buffers: Sequence[BufferState],
        codec: Codec,
        chunks: int,
        transport: Transport,
        norms: bool,
    ) -> None:
        self._named, self._buffers, self._codec = named, buffers, codec
        self._wanted, self._transport, self._norms = chunks, transport, norms
        self.clear()

    def clear(self) -> None:
        """Drop the layout."""
        self.order: list[int] = []
        self.buckets: list[GradientBucket] = []
        self.chunks: list[GradientChunk] = []
        self.buffer_chunks: list[OuterStateChunk] = []
        self.place: list[tuple[int, int]] = []
        self.chunks_of: list[list[int]] = []

    def build(self, order: Sequence[int]) -> None:
        """Lay out the parameters in this order of their numbers."""
        self.clear()
        codec, elements = self._codec, sum(p.numel() for _, p in self._named)
        self.order = list(order)
        index_of = {id(p): index for index, (_, p) in enumerate(self._named)}
        self.place = [(0, 0)] * len(self.order)
        last_of: list[tuple[int, GradientChunk]] = []
        for place, fragment in enumerate(fragments("parameters", [self._named[index] for index in self.order])):
            bucket = GradientBucket(fragment, codec.exact)
            bucket.takes_norm = self._norms
            self.buckets.append(bucket)
            for number, tensor in enumerate(fragment.tensors):
                self.place[index_of[id(tensor)]] = (place, number)
            wanted = max(1, round(self._wanted * fragment.numel / max(elements, 1)))
            for begin, end in cut(bucket.layout, wanted, codec, self._transport.coarse):
                chunk = GradientChunk(bucket, begin, end)
                final = self.order.index(index_of[id(fragment.tensors[chunk.last])])
                last_of.append((final, chunk))
        self.chunks = [chunk for _, chunk in sorted(last_of, key=lambda pair: pair[0])]
        for state in self._buffers:
            wire = torch.zeros(state.numel, dtype=state.dtype, device=state.device)
            self.buffer_chunks.append(OuterStateChunk(state, 0, state.numel, wire, PlainMean()))
        self.chunks_of = [
            [k for k, chunk in enumerate(self.chunks) if chunk.bucket is self.buckets[place] and chunk.holds(number)]
            for place, number in self.place
        ]

    # -- contents ---------------------------------------------------------------------------------

    @property
    def finite(self) -> bool:
        """Whether all packed gradients are finite."""
        return all(bucket.finite for bucket in self.buckets)

    @property
    def changed(self) -> bool:
        """Whether a gradient has changed since it was packed."""
        return any(bucket.changed() for bucket in self.buckets)

    def norm(self) -> float:
        """The norm of the packed gradients."""
        return math.sqrt(sum(bucket.square for bucket in self.buckets))

    def checksum(self) -> int:
        """Checksum of the parameters, which are equal on all workers."""
        return combine(of_tensors(bucket.fragment) for bucket in self.buckets)

    def start(self, reader: PayloadReader | None = None) -> None:
        """Begin an exchange; `reader` replaces the payload reader, if given."""
        for bucket in self.buckets:
            bucket.forget()
            if reader is not None:
                bucket.reader = reader

    def mute(self, now: bool) -> None:
        """Whether to pack zeros in place of gradients."""
        for bucket in self.buckets:
            bucket.muted = now

    # -- presence ---------------------------------------------------------------------------------

    def presence(self) -> int:
        """Checksum of the set of parameters that have a gradient."""
        marks = [False] * len(self._named)
        for index, (place, number) in enumerate(self.place):
            marks[index] = self.buckets[place].has[number]
        return zlib.crc32(bytes(marks))

    def clear_presence(self) -> None:
        """This worker has no gradients."""
        for bucket in self.buckets:
            bucket.has = [False] * len(bucket.has)

    def share_presence(self, summary: ExchangeSummary) -> None:
        """If workers have gradients of different parameters, each takes all of them."""
        weight = summary.headers[self._transport.world.rank].factor
        marks = torch.tensor([[float(has), weight * has] for bucket in self.buckets for has in bucket.has])
        device = self._transport.wire_device(marks.device)
        gathered = marks.to(device)
        self._transport.all_reduce(gathered).wait()
        rows = iter(gathered.tolist())
        for bucket in self.buckets:
            shared = [next(rows) for _ in bucket.has]
            bucket.has = [having > 0 for having, _ in shared]
            bucket.missing = [max(0.0, 1 - have / summary.weight) if summary.weight else 0.0 for _, have in shared]
