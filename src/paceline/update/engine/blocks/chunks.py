# SPDX-License-Identifier: Apache-2.0
"""The outer state cut into chunks, each a range of one tensor that travels by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.rules.codec import Codec, Layout, State
from paceline.update.engine.blocks.outer_state import Lane, Moves
from paceline.update.exchange.header import ExchangeSummary


class LaneChunk:
    """A range of a lane as a chunk of an exchange.

    Args:
        lane: the lane.
        begin, end: its range (excl.).
        wire: space for it, shape (at least end - begin,), on the carrier's device.
        minibatches: what this worker's contribution stands for, read when it is packed.
        moves: summary -> the numbers of the block.
    """

    def __init__(
        self,
        lane: Lane,
        begin: int,
        end: int,
        wire: Tensor,
        minibatches: Callable[[], int],
        moves: Callable[[ExchangeSummary], Moves],
    ) -> None:
        self.lane, self.begin, self.end = lane, begin, end
        self.layout, self.lossless = lane.layout.cut(begin, end), lane.lossless
        self.state: State = {}
        self._wire, self._minibatches, self._moves = wire[: end - begin], minibatches, moves

    @property
    def device(self) -> torch.device:
        """Where it lies for the carrier."""
        return self._wire.device

    def _blocks(self) -> list[tuple[int, int]]:
        size = self.lane.block_elements
        return [(low, min(self.end, low + size)) for low in range(self.begin, self.end, size)]

    @torch.no_grad()
    def fill(self, factor: float) -> Tensor:
        """This worker's contribution times the factor."""
        factor = self.lane.factor(factor, self._minibatches())
        if factor == 0:
            return self._wire.zero_()  # and not 0 * x: x may hold inf or nan
        for low, high in self._blocks():
            space = self._wire[low - self.begin : high - self.begin]
            out = space if space.device == self.lane.device else self.lane.scratch(2, high - low)
            self.lane.contribute(low, high, out)
            if factor != 1:
                out.mul_(int(factor) if out.dtype == torch.int64 else factor)
            if out is not space:
                space.copy_(out)
        return self._wire

    def keep(self, state: State) -> None:
        """Take the codec's state; where it lies in the wire's memory, the memory of the old one takes that place."""
        if any(shares_memory(tensor, self._wire) for tensor in state.values()):
            free = self.state.get("residual")
            self._wire = free if free is not None and free.shape == self._wire.shape else torch.empty_like(self._wire)
        self.state = state

    def land(self, total: Tensor, summary: ExchangeSummary) -> None:
        """Apply the mean."""
        self._each(total, summary, self.lane.apply)

    def prepare(self, total: Tensor, summary: ExchangeSummary) -> None:
        """Apply the mean to the outer state; the tensors are moved later."""
        self._each(total, summary, self.lane.prepare)

    @torch.no_grad()
    def move(self, made: int) -> None:
        """Move the tensors, `made` minibatches after they were held."""
        for low, high in self._blocks():
            self.lane.move(low, high, made)

    @torch.no_grad()
    def _each(
        self, total: Tensor, summary: ExchangeSummary, use: Callable[[int, int, Tensor, ExchangeSummary, Moves], None]
    ) -> None:
        weight, moves = self.lane.weight(summary), self._moves(summary)
        for low, high in self._blocks():
            mean = total[low - self.begin : high - self.begin]
            scratch = self.lane.scratch(2, high - low)
            if mean.device != self.lane.device:
                mean = scratch.copy_(mean)
            if mean.dtype == torch.int64:
                mean = torch.div(mean, int(weight), rounding_mode="floor")
            elif weight != 1:  # into scratch, which stays in the cache; the wire's memory need not be written again
                mean = torch.div(mean, weight, out=scratch)
            use(low, high, mean, summary, moves)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same storage."""
    return one.device == other.device and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


SMALL_ELEMENTS = 1 << 18
"""An exchange of fewer elements than this goes in one chunk."""


SMALL_CODED = 1 << 20
"""No chunk is smaller where a codec makes the bytes few: messages cost more than what is in them."""


def cut(layout: Layout, pieces: int, codec: Codec, coarse: int = 1) -> list[tuple[int, int]]:
    """Cut a flat tensor into at most `pieces` ranges of about one length, as suits the codec.

    Args:
        layout: the tensor's.
        pieces: so many at most.
        codec: how they will be written.
        coarse: the carrier's (:attr:`paceline.communication.base.Transport.coarse`).
    """
    if not codec.exact:
        pieces = max(1, min(pieces, layout.numel // SMALL_CODED))
    if codec.whole:
        return _cut_between(layout, pieces)
    least = SMALL_ELEMENTS * (coarse if codec.exact else 1)  # where chunks are cut decides what a lossy codec loses
    if layout.numel < least or pieces == 1:
        return [(0, layout.numel)]
    length = -(-layout.numel // pieces // 64) * 64  # offsets that suit every dtype
    return [(begin, min(layout.numel, begin + length)) for begin in range(0, layout.numel, length)]


def _cut_between(layout: Layout, pieces: int) -> list[tuple[int, int]]:
    """Cut between matrices."""
    length = -(-layout.numel // pieces)
    ranges, begin = [], 0
    for matrix in layout.matrices:
        if matrix.end - begin >= length or matrix.end == layout.numel:
            ranges.append((begin, matrix.end))
            begin = matrix.end
    return ranges
