# SPDX-License-Identifier: Apache-2.0
"""The outer state cut into chunks, each a range of one tensor that is exchanged separately."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.rules.codec import Codec, Dense, Layout, State
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.numbers import BlockEnd, Contribution
from paceline.update.engine.blocks.outer_state import OuterState
from paceline.update.exchange.exchanger import IN_FLIGHT, Exchanger
from paceline.update.exchange.header import ExchangeSummary

Use = Callable[[int, int, Tensor, ExchangeSummary, BlockEnd], None]
"""Applies the mean of a range."""


class OuterStateChunk:
    """A range of an outer state as a chunk of an exchange.

    Args:
        outer: the outer state.
        begin, end: its range (excl.).
        wire: memory for it, shape (at least end - begin,), on the outer state's device.
        numbers: of the block; read when the chunk is packed and when it lands.

    Attributes:
        packed: whether the wire memory holds the contribution already, for the next `fill` only.
        on_packed: called with this chunk when it does.
    """

    def __init__(self, outer: OuterState, begin: int, end: int, wire: Tensor, numbers: Contribution) -> None:
        self.outer, self.begin, self.end = outer, begin, end
        self.layout, self.lossless = outer.layout.cut(begin, end), outer.lossless
        self.from_rank_0 = outer.fragment.from_rank_0
        self.state: State = {}
        self.packed = False
        self.on_packed: Callable[[OuterStateChunk], None] | None = None
        self._wire, self._numbers = wire[: end - begin], numbers

    @property
    def device(self) -> torch.device:
        """The device of the wire memory."""
        return self._wire.device

    def space(self, low: int, high: int) -> Tensor:
        """The wire memory of [low, high)."""
        return self._wire[low - self.begin : high - self.begin]

    def set_packed(self) -> None:
        """The wire memory holds the contribution."""
        self.packed = True
        if self.on_packed is not None:
            self.on_packed(self)

    def _blocks(self) -> list[tuple[int, int]]:
        size = self.outer.block_elements
        return [(low, min(self.end, low + size)) for low in range(self.begin, self.end, size)]

    @torch.no_grad()
    def fill(self, factor: float) -> Tensor:
        """This worker's contribution times the factor."""
        factor = self.outer.factor(factor, self._numbers.minibatches)
        packed, self.packed = self.packed, False
        if factor == 0:
            return self._wire.zero_()  # and not 0 * x: x may hold inf or nan
        if packed:
            return self._wire if factor == 1 else self._wire.mul_(factor)
        for low, high in self._blocks():
            space = self.space(low, high)
            self.outer.contribute(low, high, space)
            if factor != 1:
                space.mul_(int(factor) if space.dtype == torch.int64 else factor)
        return self._wire

    def keep(self, state: State) -> None:
        """Take the codec's state; if it lies in the wire memory, continue with the old state's memory."""
        if any(shares_memory(tensor, self._wire) for tensor in state.values()):
            free = self.state.get("residual")
            self._wire = free if free is not None and free.shape == self._wire.shape else torch.empty_like(self._wire)
        self.state = state

    def land(self, total: Tensor, summary: ExchangeSummary) -> None:
        """Apply the mean."""
        self._each(total, summary, self.outer.apply)

    def prepare(self, total: Tensor, summary: ExchangeSummary) -> None:
        """Apply the mean to the outer state; `move` moves the tensors later."""
        self._each(total, summary, self.outer.prepare)

    @torch.no_grad()
    def move(self, made: int) -> None:
        """Move the tensors, `made` minibatches after their snapshot was taken."""
        for low, high in self._blocks():
            self.outer.move(low, high, made)

    @torch.no_grad()
    def _each(self, total: Tensor, summary: ExchangeSummary, use: Use) -> None:
        weight, block = self.outer.weight(summary), self._numbers.end(summary)
        integers = total.dtype == torch.int64
        for (low, high), mean in zip(self._blocks(), torch.split(total, self.outer.block_elements), strict=True):
            if integers:
                mean = torch.div(mean, int(weight), rounding_mode="floor")
            elif weight != 1:  # into scratch, which stays in the cache
                mean = torch.div(mean, weight, out=self.outer.scratch(2, high - low))
            use(low, high, mean, summary, block)


def restored(saved: State, device: torch.device) -> State:
    """A codec's state from a checkpoint, copied to `device`."""
    return {name: tensor.to(device, copy=True) for name, tensor in saved.items()}


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share a storage."""
    return one.device == other.device and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def packings(chunks: Sequence[OuterStateChunk], state: OuterState) -> list[OuterStateChunk]:
    """The chunks of `state` whose wire memory no earlier chunk needs."""
    first = {chunk.space(chunk.begin, chunk.end).data_ptr(): chunk for chunk in reversed(chunks)}
    return [chunk for chunk in first.values() if chunk.outer is state]


def cut_states(
    states: Sequence[OuterState],
    rule: Rule,
    exchanger: Exchanger,
    numbers: Contribution,
    overlapped: bool,
    measured: bool,
) -> list[OuterStateChunk]:
    """Cut all outer states of a fragment into chunks.

    In host memory each chunk of parameters has its own wire memory, so that the pass that takes the norm packs all of
    them; so has each chunk of an exchange that keeps its contribution. Other chunks share a few wire buffers.

    Args:
        states: the outer states.
        rule: gives the number of chunks and their codec.
        exchanger: the connection.
        numbers: of the block.
        overlapped: whether the next block computes during an exchange.
        measured: whether the norms of contributions are taken.
    """
    pieces: list[tuple[OuterState, int, int]] = []
    total = sum(state.numel for state in states)
    codec = rule.codec
    for state in states:
        wanted = max(1, round(rule.common.chunks * state.numel / max(total, 1)))
        ranges = cut(state.layout, wanted, Dense() if state.lossless else codec, exchanger.transport.coarse)
        pieces += [(state, begin, end) for begin, end in ranges]
    wires: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}
    longest: dict[tuple[torch.dtype, torch.device], int] = {}
    for state, begin, end in pieces:
        key = (state.dtype, state.device)
        longest[key] = max(longest.get(key, 0), end - begin)
    chunks = []
    for turn, (state, begin, end) in enumerate(pieces):
        key = (state.dtype, state.device)
        packs = measured and state.device.type == "cpu"  # a pass takes longer there than on a device
        own = overlapped or exchanger.keeps or (not state.lossless and (packs or not codec.exact))
        name = (*key, -1 - turn if own else turn % IN_FLIGHT)
        if name not in wires:
            wires[name] = torch.zeros(end - begin if own else longest[key], dtype=key[0], device=key[1])
        chunks.append(OuterStateChunk(state, begin, end, wires[name], numbers))
    return chunks


SMALL_ELEMENTS = 1 << 18
"""The least elements of a chunk, 1 MiB in fp32. Each message costs the processors: with eight workers on two cores,
chunks of 0.6 MB took twice the processor time of chunks of 1.3 MB. Larger chunks leave a backward pass less to hide."""
SMALL_CODED = 1 << 20
"""The least elements of a chunk under a lossy codec, whose messages are so short that their number costs more."""


def cut(layout: Layout, pieces: int, codec: Codec, coarse: int = 1) -> list[tuple[int, int]]:
    """Cut a flat tensor into at most `pieces` ranges of about one length, as suits the codec; a small one into fewer.

    Args:
        layout: the tensor's.
        pieces: the largest number of ranges.
        codec: the codec of the ranges.
        coarse: the transport's (:attr:`paceline.communication.base.Transport.coarse`).
    """
    least = SMALL_ELEMENTS * coarse if codec.exact else SMALL_CODED  # a lossy codec's loss depends on the cuts
    pieces = max(1, min(pieces, layout.numel // least))
    if codec.whole:
        return _cut_between(layout, pieces)
    if pieces == 1:
        return [(0, layout.numel)]
    length = -(-layout.numel // pieces // 64) * 64  # offsets aligned for every dtype
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
