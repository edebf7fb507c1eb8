# SPDX-License-Identifier: Apache-2.0
"""Outer state: computes a worker's contribution to a block exchange, and applies the workers' mean.

`contribute` and `apply` work on any range of the fragment, in cache-sized scratch. One pass over memory packs the
contribution and takes its norm, which tells whether it is finite; one applies the mean, takes its norm and its
checksum. Outer state is at most two 32-bit numbers a parameter (anchor and Delta), one for the average of the global
model if the rule has one, and one for each compensated moment.

Under overlap, `take_snapshot` copies the tensors when the exchange begins. A background thread sends the snapshot's
contribution and applies the mean to the outer state (`prepare`). When the exchange lands, `made` minibatches later,
`move` changes the tensors:

    parameters   now + (start - snapshot)                 the new start plus the progress made meanwhile
                 alpha now + (1 - alpha) start            with a mixing alpha, as Streaming DiLoCo does
    moments      now + b^made (start - snapshot)          the optimizer's recursion from the new start
    buffers      (now + mean) / 2                         between two valid values, never beyond them
    counters     now + (start - snapshot)
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.core import kernels
from paceline.core.flat import BLOCK_ELEMENTS_CPU, Fragment, all_finite
from paceline.rules.codec import Layout
from paceline.rules.outer import Outer
from paceline.rules.outer.moving_average import EMA
from paceline.update.engine.blocks.numbers import BlockEnd, BlockNumbers
from paceline.update.exchange.checksum import fold
from paceline.update.exchange.header import ExchangeSummary

NORM_ELEMENTS_CPU = 131_072
"""Elements of a partial norm, which divide a block's: how a norm is rounded depends on them."""
LARGEST = 1e150
"""In place of a norm that overflows; its square does not overflow."""


class Packing(Protocol):
    """A range, `begin` to `end` (excl.), of a contribution, which can be packed before its exchange starts."""

    begin: int
    end: int

    def set_packed(self) -> None:
        """Its memory holds the contribution."""

    def space(self, low: int, high: int) -> Tensor:
        """The memory of a part of it, shape (high - low,), on the outer state's device."""


class OuterState(ABC):
    """A fragment and its outer state.

    Args:
        fragment: the user's tensors.
        device: of the outer state; None for the tensors' own device.
    """

    lossless = True
    """Whether it must be sent without loss: only differences between two models tolerate a lossy codec."""

    def __init__(self, fragment: Fragment, device: torch.device | None = None) -> None:
        self.fragment = fragment
        self.device = device or fragment.device
        self.layout = Layout.of(s.shape if math.prod(s.shape) == s.numel else (s.numel,) for s in fragment.slots)
        self.snapshot: Tensor | None = None
        self.uses_snapshot = False
        self.checksum = torch.zeros((), dtype=torch.int64, device=self.device)
        self._scratch: dict[tuple[int, int, int], Tensor] = {}

    @property
    def numel(self) -> int:
        """Elements of the fragment."""
        return self.fragment.numel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype on the wire."""
        return self.fragment.outer_dtype

    @property
    def block_elements(self) -> int:
        """Elements handled at a time."""
        return BLOCK_ELEMENTS_CPU if self.device.type == "cpu" else self.fragment.block_elements

    def partial_norms(self, x: Tensor) -> list[Tensor]:
        """The norms of parts of a block `x`, shape (n,); in a pass of their own over what is still in the cache."""
        elements = NORM_ELEMENTS_CPU if self.device.type == "cpu" else self.block_elements
        return [torch.linalg.vector_norm(part) for part in torch.split(x, elements)]

    def scratch(self, number: int, elements: int) -> Tensor:
        """Temporary memory, shape (elements,), in the outer dtype; separate for each number and thread."""
        thread = threading.get_ident()
        found = self._scratch.get((thread, number, elements))
        if found is None:  # a view for each length: blocks are many, and their lengths few
            memory = self._scratch.get((thread, number, 0))
            if memory is None:
                size = min(self.block_elements, self.numel)
                memory = torch.empty(size, dtype=self.dtype, device=self.device)
                self._scratch[thread, number, 0] = memory
            found = self._scratch[thread, number, elements] = memory[:elements]
        return found

    def take_snapshot(self) -> None:
        """Copy the tensors, for an exchange during which the next block computes."""
        self.uses_snapshot = True
        self.snapshot = self.fragment.whole(self.device, out=self.snapshot)

    def values(self, begin: int, end: int) -> Tensor:
        """The tensors, or their snapshot if one is in use; read-only."""
        if self.uses_snapshot:
            assert self.snapshot is not None
            return self.snapshot[begin:end]
        return self.fragment.read(begin, end, self.scratch(0, end - begin))

    def _add(self, begin: int, end: int, share: float) -> Tensor:
        """The present tensors plus a share of `snapshot`; in scratch, or in place if they are contiguous."""
        assert self.snapshot is not None
        out = self.fragment.piece(begin, end, self.scratch(3, end - begin))
        now = self.fragment.read(begin, end, self.scratch(3, end - begin))
        return torch.add(
            now, self.snapshot[begin:end], alpha=int(share) if out.dtype == torch.int64 else share, out=out
        )

    def _put(self, begin: int, end: int, values: Tensor) -> None:
        """Write the result of `_add` to the tensors."""
        if values.data_ptr() == self.scratch(3, end - begin).data_ptr():
            self.fragment.write(begin, end, values)

    def weight(self, summary: ExchangeSummary) -> float:
        """The divisor of the sum over the workers."""
        return summary.weight

    def factor(self, factor: float, minibatches: int) -> float:
        """The factor on this worker's contribution."""
        return factor

    def norm(self, packings: Sequence[Packing] = ()) -> float | None:
        """Euclidean norm of this worker's contribution, possibly inf or nan; None if outliers are not judged by it.

        The pass over memory that finds it also packs the contribution's ranges that are given.
        """
        return None

    @abstractmethod
    def contribute(self, begin: int, end: int, out: Tensor) -> None:
        """Write this worker's contribution for [begin, end) into `out`, on the outer state's device."""

    @abstractmethod
    def apply(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        """Apply the workers' mean of [begin, end)."""

    @abstractmethod
    def prepare(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        """Apply the mean of [begin, end) to the outer state only; `snapshot` becomes the input of `move`."""

    def move(self, begin: int, end: int, made: int) -> None:
        """Move the tensors by the result of `prepare`, `made` minibatches after the snapshot."""
        self._put(begin, end, self._add(begin, end, 1))

    @abstractmethod
    def capture(self) -> None:
        """Take the present tensors as the common start of the next block."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the tensors of the block's start, as far as it is known."""

    def state(self) -> dict[str, Tensor]:
        """Outer state by name, for checkpoints."""
        return {}


class ParameterState(OuterState):
    """Parameters: sends the delta, applies the outer step.

    Args:
        outer: the rule's outer step.
        numbers: of the present block; `origin` needs its look-ahead.
        mixing: alpha, the share of the local parameters that stays when an exchange lands; None keeps the progress made
            meanwhile.
        mixes_at_once: whether that also applies to exchanges without overlap.

    Attributes:
        mean_norms: where a range begins -> the norms of the mean that was applied to it; None where not taken.
        mean_norm: of all ranges, when `sum_mean_norms` was called last.
    """

    lossless = False

    def __init__(
        self,
        fragment: Fragment,
        outer: Outer,
        numbers: BlockNumbers,
        device: torch.device | None,
        mixing: float | None = None,
        mixes_at_once: bool = False,
    ) -> None:
        super().__init__(fragment, device)
        self._outer, self._numbers, self._mixing = outer, numbers, mixing
        self._at_once = mixing if mixes_at_once else None
        self.anchor = fragment.whole(self.device)
        self.tensors = {name: fragment.zeros(self.device) for name in outer.tensors}
        self._parts: dict[tuple[int, int], tuple[Tensor, dict[str, Tensor]]] = {}
        self._begin_average()
        self.mean_norms: dict[int, list[Tensor]] | None = None
        self.mean_norm = 0.0

    def retune(self, outer: Outer) -> None:
        """Continue with other numbers of the same outer step."""
        self._outer = outer

    def _part(self, begin: int, end: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The anchor and the outer step's tensors in [begin, end); cached, since blocks return at every exchange."""
        found = self._parts.get((begin, end))
        if found is None:
            state = {name: tensor[begin:end] for name, tensor in self.tensors.items()}
            found = self._parts[begin, end] = (self.anchor[begin:end], state)
        return found

    def _origin(self, begin: int, end: int, out: Tensor) -> Tensor:
        """The start of the block as the worker saw it, rounded to the parameters' dtype; may lie in `out`."""
        anchor, state = self._part(begin, end)
        origin = self._outer.origin(anchor, state, self._numbers.coefficients(), out)
        if self.fragment.dtype != self.dtype:
            return out.copy_(origin.to(self.fragment.dtype))
        return origin

    def contribute(self, begin: int, end: int, out: Tensor) -> None:
        torch.sub(self.values(begin, end), self._origin(begin, end, out), out=out)

    @torch.no_grad()
    def norm(self, packings: Sequence[Packing] = ()) -> float:
        norms: list[Tensor] = []
        for low in range(0, self.numel, self.block_elements):
            high = min(self.numel, low + self.block_elements)
            norms += self._norms_of(low, high, packings)
            for packing in packings:
                if low < packing.end <= high:
                    packing.set_packed()
        return float(torch.linalg.vector_norm(torch.stack(norms).double())) if norms else 0.0

    def _norms_of(self, low: int, high: int, packings: Sequence[Packing]) -> list[Tensor]:
        """The norms of one block of the contribution, which is packed on the way."""
        over = [packing for packing in packings if packing.begin < high and low < packing.end]
        inside = len(over) == 1 and over[0].begin <= low and high <= over[0].end
        out = over[0].space(low, high) if inside else self.scratch(2, high - low)
        norms = self._contribute(low, high, out)
        for packing in () if inside else over:
            first, last = max(low, packing.begin), min(high, packing.end)
            packing.space(first, last).copy_(out[first - low : last - low])
        return norms

    def _contribute(self, low: int, high: int, out: Tensor) -> list[Tensor]:
        """Write the contribution for [low, high) into `out`; its partial norms."""
        if not kernels.serve(out):
            self.contribute(low, high, out)
            return self.partial_norms(out)
        from paceline.core.kernels.packing import difference

        origin = self._outer.origin(*self._part(low, high), self._numbers.coefficients(), out)
        return [difference(self.values(low, high), origin, self.fragment.dtype, out).sum().sqrt()]

    def apply(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        scratch = self.scratch(1, end - begin)
        out = scratch if self._at_once else self.fragment.piece(begin, end, scratch)
        start = self._step(begin, end, mean, block, out)
        if self._at_once:
            self._mix(begin, end, start, self._at_once)
        elif start is not out or out is scratch:
            self.fragment.write(begin, end, start)

    def _step(self, begin: int, end: int, mean: Tensor, block: BlockEnd, out: Tensor) -> Tensor:
        """The outer step on a range; the start of the next block."""
        if self.mean_norms is not None:
            self.mean_norms[begin] = self.partial_norms(mean)
        anchor, state = self._part(begin, end)
        start = self._outer.step(anchor, mean, state, block.coefficients, out)
        fold(self.checksum, start)
        return start

    def sum_mean_norms(self) -> None:
        """Bring `mean_norm` up to date; in the order of the ranges, whatever the order in which they came."""
        if self.mean_norms:
            norms = [norm for _, part in sorted(self.mean_norms.items()) for norm in part]
            self.mean_norm = float(torch.linalg.vector_norm(torch.stack(norms).double()))
            self.mean_norms.clear()

    def prepare(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        assert self.snapshot is not None
        snapshot = self.snapshot[begin:end]
        start = self._step(begin, end, mean, block, self.scratch(1, end - begin))
        if self._mixing is None:
            torch.sub(start, snapshot, out=snapshot)
        else:
            snapshot.copy_(start)

    def move(self, begin: int, end: int, made: int) -> None:
        if self._mixing is None:
            super().move(begin, end, made)
            return
        assert self.snapshot is not None
        self._mix(begin, end, self.snapshot[begin:end], self._mixing)

    def _mix(self, begin: int, end: int, start: Tensor, share: float) -> None:
        """Mix a share of the present parameters with the new start."""
        now = self.fragment.read(begin, end, self.scratch(3, end - begin))
        self.fragment.write(begin, end, torch.lerp(start, now, share))

    def capture(self) -> None:
        self.anchor.copy_(self.fragment.whole(self.device))
        for tensor in self.tensors.values():
            tensor.zero_()
        self._begin_average()

    def _begin_average(self) -> None:
        """Before the first block the average is the model itself."""
        if EMA in self.tensors:
            self.tensors[EMA].copy_(self.anchor)

    @property
    def exported(self) -> Tensor:
        """The global model, or the average of it if the rule has one."""
        return self.tensors.get(EMA, self.anchor)

    def restore(self) -> None:
        for begin, end in self.fragment.blocks(0, self.numel):
            for low in range(begin, end, self.block_elements):
                high = min(end, low + self.block_elements)
                self.fragment.write(low, high, self._origin(low, high, self.scratch(1, high - low)))

    def state(self) -> dict[str, Tensor]:
        return {"anchor": self.anchor, **self.tensors}


def measure(states: Iterable[OuterState], packings: Callable[[OuterState], Sequence[Packing]]) -> tuple[float, bool]:
    """The norm of these states' joint contribution, and whether all of it is finite.

    Args:
        states: the outer states.
        packings: gives the ranges of a state that can be packed in the same pass.
    """
    square, unsure = 0.0, []
    for state in states:
        norm = state.norm(packings(state))
        if norm is None or not math.isfinite(norm):
            unsure.append(state.fragment)  # large finite numbers may overflow the norm
        square += min(norm, LARGEST) ** 2 if norm is not None and norm == norm else 0.0
    finite = all_finite(unsure)
    return math.sqrt(square) if finite else 0.0, finite
