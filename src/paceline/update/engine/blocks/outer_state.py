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

Running statistics of normalisation layers are averaged. Of every other buffer all workers take rank 0's, as under
DistributedDataParallel: the mean of a queue, a mask or a pointer means nothing. Running statistics keep an inf or nan
of a bad batch, which would make the workers' mean invalid; so they are reset to the last mean before an exchange. Other
buffers may be infinite by intent: numbers that were finite are reset.

For the wire each outer state is cut into chunks (`cut_states`), ranges of one tensor that are exchanged separately.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core import kernels
from paceline.core.flat import BLOCK_ELEMENTS_CPU, Fragment, Modules, all_finite, buffer_fragments, fragments
from paceline.core.optimizer_state import Named, OptimizerMoment, Owned, ensure_state, moments, parameter_state
from paceline.core.world import World
from paceline.errors import UnsupportedError
from paceline.rules.codec import Codec, Dense, Layout, State
from paceline.rules.outer.base import Coefficients
from paceline.rules.outer.diversity import effective_workers, ratio, smoothed
from paceline.rules.outer.moments import block_decay, compensate
from paceline.rules.outer.moving_average import EMA
from paceline.rules.rule import Rule
from paceline.update.exchange.exchanger import IN_FLIGHT, Exchanger, ExchangeSummary, fold

NORM_ELEMENTS_CPU = 131_072
"""Elements of a partial norm, which divide a block's: how a norm is rounded depends on them."""
LARGEST = 1e150
"""In place of a norm that overflows; its square does not overflow."""
logger = logging.getLogger("paceline")
Packed = Callable[["OuterStateChunk"], None]
"""Called with a chunk whose wire memory holds the contribution."""


@dataclass(frozen=True)
class Diversity:
    """The diversity of the workers' displacements, as far as the headers tell it.

    The norm of a mean is known when it has been applied, and workers of other machines may round it otherwise. So the
    header of the next exchange tells it, and all take what one worker found.
    """

    smoothed: float | None = None  # A of the last block but one; None before the second exchange
    mean_of_norms: float = 0.0  # of the last exchange
    workers: int = 0  # that brought something to it

    @property
    def effective(self) -> float | None:
        """How many workers they are worth; None before that is known."""
        return None if self.smoothed is None else effective_workers(self.smoothed)

    def after(self, summary: ExchangeSummary) -> Diversity:
        """With what the headers of the next exchange tell of the last one."""
        if not self.mean_of_norms or not summary.last_mean_norm:
            return self
        now = ratio(self.mean_of_norms, summary.last_mean_norm, self.workers)
        return replace(self, smoothed=smoothed(self.smoothed, now))

    def then(self, summary: ExchangeSummary) -> Diversity:
        """That exchange is over."""
        return replace(self, mean_of_norms=summary.mean_of_norms, workers=len(summary.accepted))

    def among(self, workers: int) -> Diversity:
        """With another number of workers: they cannot be worth more than they are."""
        most = None if self.smoothed is None else min(self.smoothed, math.sqrt(workers))
        return replace(self, smoothed=most, workers=min(self.workers, workers))


@dataclass(frozen=True)
class BlockEnd:
    """The coefficients and counts at the end of a block, the same on every worker."""

    coefficients: Coefficients
    rho: float  # equivalent minibatches that the outer step has accumulated
    ahead: float  # kv, minibatches that the next start is ahead of the mean of the local models
    diversity: Diversity  # of the workers' displacements, with what the headers of this exchange tell
    summary: ExchangeSummary  # the headers


class BlockNumbers:
    """The count of a fragment's blocks, and the numbers of the present one."""

    def __init__(self, rule: Rule, workers: int) -> None:
        self.rule, self.workers = rule, workers
        self.worth: float | None = None  # workers that the mean is worth where they make unequal blocks
        # whether the rule's mixing applies to exchanges without overlap
        self.mixes_at_once = rule.payload.mixing is not None and not rule.schedule.overlap
        # blocks that were exchanged; equivalent minibatches in the outer step; look-ahead momentum of the block's start
        self.block, self.rho, self.ahead = 0, 0.0, 0.0
        self.diversity = Diversity()  # of the workers' displacements, up to the last block but one
        self.minibatches = 0  # of this worker's contribution to the present exchange
        self._frozen: Coefficients | None = None
        self._end: BlockEnd | None = None

    def restart(self, block: int = 0, rho: float = 0.0, ahead: float = 0.0) -> None:
        """Continue from other numbers, such as a checkpoint's, without a pending exchange."""
        self.block, self.rho, self.ahead = block, rho, ahead
        self.diversity = Diversity()
        self._frozen = None

    def coefficients(self) -> Coefficients:
        """The present block's coefficients; during its exchange, those of the beginning of the exchange."""
        return self._frozen or self.rule.coefficients(self.block + 1, self.worth or self.workers, self.ahead)

    def freeze(self, coefficients: Coefficients | None = None) -> None:
        """Keep these coefficients (by default the present ones) for the exchange, despite retuning."""
        self._frozen = coefficients or self.coefficients()

    def release(self) -> None:
        """End the effect of `freeze`."""
        self._frozen = None

    def renumber(self, workers: int) -> None:
        """Continue with this number of workers, also in a pending exchange."""
        self.workers = workers
        self.diversity = self.diversity.among(workers)
        if self._frozen is not None:
            self._frozen = None
            self.freeze()

    def end(self, summary: ExchangeSummary) -> BlockEnd:
        """The numbers at the end of this exchange."""
        if self._end is None or self._end.summary is not summary:
            self._end = self._end_of(summary, self.coefficients())
        return self._end

    def _end_of(self, summary: ExchangeSummary, coefficients: Coefficients) -> BlockEnd:
        diversity = self.diversity.after(summary)
        coefficients = replace(coefficients, diversity=diversity.smoothed or 1.0)
        rho, ahead = self.rule.merging.equivalent_minibatches(self.rho, summary.tau, coefficients)
        return BlockEnd(coefficients, rho, ahead, diversity, summary)

    def advance(self, summary: ExchangeSummary) -> BlockEnd:
        """Count the exchange; the next block begins."""
        end = self.end(summary)
        self.block, self.rho, self.ahead = self.block + 1, end.rho, end.coefficients.next_momentum
        self.diversity = end.diversity.then(summary)
        return end

    def count_in(self, summary: ExchangeSummary, workers: int) -> BlockEnd:
        """Count an exchange among `workers` workers whose result is in the outer state already."""
        end = self._end_of(summary, self.rule.coefficients(self.block + 1, workers, self.ahead))
        self.block, self.rho = self.block + 1, end.rho
        self.diversity = end.diversity.then(summary)
        return end


class OuterState(ABC):
    """A fragment and its outer state; `start` is None where no copy of the block's start is kept."""

    lossless = True
    """Whether it must be sent without loss: only differences between two models tolerate a lossy codec."""
    start: Tensor | None = None
    start_name = "anchor"

    def __init__(self, fragment: Fragment, device: torch.device | None = None) -> None:
        self.fragment = fragment
        self.device = device or fragment.device
        self.layout = Layout.of(s.shape if math.prod(s.shape) == s.numel else (s.numel,) for s in fragment.slots)
        self.snapshot: Tensor | None = None
        self.uses_snapshot = False
        self.checksum = torch.zeros((), dtype=torch.int64, device=self.device)
        self._scratch: dict[tuple[int, int, int], Tensor] = {}
        self.numel, self.dtype = fragment.numel, fragment.outer_dtype
        self.block_elements = BLOCK_ELEMENTS_CPU if self.device.type == "cpu" else fragment.block_elements

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
        if self.uses_snapshot and self.snapshot is not None:
            return self.snapshot[begin:end]
        return self.fragment.read(begin, end, self.scratch(0, end - begin))

    def in_place(self, begin: int, end: int) -> tuple[list[Tensor], list[tuple[int, int]]] | None:
        """The tensors' own pieces and their places, which need no copy; None where dtype or device is another."""
        alike = (self.fragment.dtype, self.fragment.device) == (self.dtype, self.device)
        return self.fragment.cut(begin, end) if alike else None

    def _shift(self, begin: int, end: int, share: float, least: float | None = None) -> None:
        """Add a share of `snapshot` to the tensors, none below `least`."""
        assert self.snapshot is not None
        scratch, parts = self.scratch(3, end - begin), self.in_place(begin, end)
        into, places = parts or ([self.fragment.read(begin, end, scratch)], [(0, end - begin)])
        with torch.no_grad():
            added = [self.snapshot[begin + low : begin + high] for low, high in places]
            torch._foreach_add_(into, added, alpha=int(share) if self.dtype == torch.int64 else share)
            if least is not None:
                torch._foreach_clamp_min_(into, least)
        if parts is None:
            self.fragment.write(begin, end, scratch)

    def weight(self, summary: ExchangeSummary) -> float:
        """The divisor of the sum over the workers."""
        return summary.weight

    def factor(self, factor: float, minibatches: int) -> float:
        """The factor on this worker's contribution."""
        return factor

    def norm(self, packings: Sequence[OuterStateChunk], packed: Packed | None) -> float | None:
        """Euclidean norm of this worker's contribution, possibly inf or nan; None if outliers are not judged by it. The
        same pass over memory packs the chunks that are given, and calls `packed` with each."""
        return None

    def contribute(self, begin: int, end: int, out: Tensor) -> None:
        """Write this worker's contribution for [begin, end) into `out`, on the outer state's device."""
        out.copy_(self.values(begin, end))

    @abstractmethod
    def next(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> Tensor:
        """Update the outer state with the workers' mean of [begin, end); what the next block starts with."""

    def apply(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> None:
        self.fragment.write(begin, end, self.next(begin, end, mean, block))

    def prepare(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> None:
        """Apply the mean of [begin, end) to the outer state only; `snapshot` becomes the input of `move`."""
        assert self.snapshot is not None
        snapshot = self.snapshot[begin:end]
        torch.sub(self.next(begin, end, mean, block), snapshot, out=snapshot)

    def move(self, begin: int, end: int, made: int) -> None:
        """Move the tensors by the result of `prepare`, `made` minibatches after the snapshot."""
        self._shift(begin, end, 1)

    def capture(self) -> None:
        """Take the present tensors as the common start of the next block."""
        if self.start is not None:
            self.start.copy_(self.fragment.whole(self.device))

    def restore(self) -> None:
        """Restore the tensors of the block's start, as far as it is known."""
        if self.start is not None:
            self.fragment.write(0, self.numel, self.start)

    def state(self) -> dict[str, Tensor]:
        """Outer state by name, for checkpoints."""
        return {} if self.start is None else {self.start_name: self.start}


class ParameterState(OuterState):
    """Parameters: sends the delta, applies the outer step; both are those of the rule of `numbers`, the block's."""

    lossless = False

    def __init__(self, fragment: Fragment, numbers: BlockNumbers, device: torch.device | None) -> None:
        super().__init__(fragment, device)
        rule = numbers.rule
        # alpha, the local parameters' share when an exchange lands; None keeps the progress made meanwhile
        self._numbers, self._mixing = numbers, rule.payload.mixing
        self._at_once = rule.payload.mixing if numbers.mixes_at_once else None
        self.start = self.anchor = fragment.whole(self.device)
        self.tensors = {name: fragment.zeros(self.device) for name in rule.merging.tensors}
        self._parts: dict[tuple[int, int], tuple[Tensor, dict[str, Tensor]]] = {}
        if EMA in self.tensors:  # before the first block the average is the model itself
            self.tensors[EMA].copy_(self.anchor)
        # where a range begins -> the norms of the mean that was applied to it; None where not taken
        self.mean_norms: dict[int, list[Tensor]] | None = None
        self.mean_norm = 0.0  # of all ranges, when `sum_mean_norms` was called last

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
        origin = self._numbers.rule.merging.origin(anchor, state, self._numbers.coefficients(), out)
        if self.fragment.dtype != self.dtype:
            return out.copy_(origin.to(self.fragment.dtype))
        return origin

    def contribute(self, begin: int, end: int, out: Tensor) -> None:
        origin, parts = self._origin(begin, end, out), None if self.uses_snapshot else self.in_place(begin, end)
        for piece, (low, high) in zip(*(parts or ([self.values(begin, end)], [(0, end - begin)])), strict=True):
            torch.sub(piece, origin[low:high], out=out[low:high])

    @torch.no_grad()
    def norm(self, packings: Sequence[OuterStateChunk], packed: Packed | None) -> float:
        norms: list[Tensor] = []
        for low in range(0, self.numel, self.block_elements):
            high = min(self.numel, low + self.block_elements)
            over = [packing for packing in packings if packing.begin < high and low < packing.end]
            inside = len(over) == 1 and over[0].begin <= low and high <= over[0].end
            out = over[0].space(low, high) if inside else self.scratch(2, high - low)
            if self.device.type != "cpu" and kernels.serve(out):
                from paceline.core.kernels.blocks import difference

                origin = self._numbers.rule.merging.origin(*self._part(low, high), self._numbers.coefficients(), out)
                norms.append(difference(self.values(low, high), origin, self.fragment.dtype, out).sum().sqrt())
            else:
                self.contribute(low, high, out)
                norms += self.partial_norms(out)
            for packing in over:
                if not inside:
                    first, last = max(low, packing.begin), min(high, packing.end)
                    packing.space(first, last).copy_(out[first - low : last - low])
                packing.packed = packing.end <= high
                if packing.packed and packed is not None:
                    packed(packing)
        return float(torch.linalg.vector_norm(torch.stack(norms).double())) if norms else 0.0

    def apply(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> None:
        scratch = self.scratch(1, end - begin)
        out = scratch if self._at_once else self.fragment.piece(begin, end, scratch)
        start = self._step(begin, end, mean, block, out)
        if self._at_once:
            self._mix(begin, end, start, self._at_once)
        elif start is not out or out is scratch:
            self.fragment.write(begin, end, start)

    def next(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> Tensor:
        return self._step(begin, end, mean, block, self.scratch(1, end - begin))

    def _step(self, begin: int, end: int, mean: Tensor, block: BlockEnd, out: Tensor) -> Tensor:
        """The outer step on a range; the start of the next block."""
        if self.mean_norms is not None:
            self.mean_norms[begin] = self.partial_norms(mean)
        anchor, state = self._part(begin, end)
        start = self._numbers.rule.merging.step(anchor, mean, state, block.coefficients, out)
        fold(self.checksum, start)
        return start

    def sum_mean_norms(self) -> float:
        """Bring `mean_norm` up to date; in the order of the ranges, whatever the order in which they came."""
        if self.mean_norms:
            norms = [norm for _, part in sorted(self.mean_norms.items()) for norm in part]
            self.mean_norm = float(torch.linalg.vector_norm(torch.stack(norms).double()))
            self.mean_norms.clear()
        return self.mean_norm

    def prepare(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> None:
        if self._mixing is None:
            return super().prepare(begin, end, mean, block)
        assert self.snapshot is not None
        self.snapshot[begin:end].copy_(self.next(begin, end, mean, block))

    def move(self, begin: int, end: int, made: int) -> None:
        if self._mixing is None:
            return super().move(begin, end, made)
        assert self.snapshot is not None
        self._mix(begin, end, self.snapshot[begin:end], self._mixing)

    def _mix(self, begin: int, end: int, start: Tensor, share: float) -> None:
        """Mix a share of the present parameters with the new start."""
        now = self.fragment.read(begin, end, self.scratch(3, end - begin))
        self.fragment.write(begin, end, torch.lerp(start, now, share))

    def capture(self) -> None:
        super().capture()
        for tensor in self.tensors.values():
            tensor.zero_()
        if EMA in self.tensors:  # before the first block the average is the model itself
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


def measure(
    states: Iterable[OuterState], chunks: Sequence[OuterStateChunk], packed: Packed | None = None
) -> tuple[float, bool]:
    """The norm of these states' joint contribution, without what all take from rank 0, and whether all of it is finite.
    The same pass packs the chunks whose wire memory no earlier chunk needs, and calls `packed` with each."""
    first = {chunk.space(chunk.begin, chunk.end).data_ptr(): chunk for chunk in reversed(chunks)}
    for chunk in chunks:
        chunk.packed = False  # an exchange that failed may have left it
    square, unsure = 0.0, []
    for state in states:
        if state.fragment.from_rank_0:
            continue
        norm = state.norm([chunk for chunk in first.values() if chunk.outer is state], packed)
        if norm is None or not math.isfinite(norm):
            unsure.append(state.fragment)  # large finite numbers may overflow the norm
        square += min(norm, LARGEST) ** 2 if norm is not None and norm == norm else 0.0
    finite = not unsure or all_finite(unsure)
    return math.sqrt(square) if finite else 0.0, finite


class MomentState(OuterState):
    """One moment of the local optimizer; b is its `decay`, read at the time of use. `compensated`: for the outer
    step."""

    start_name = "init"

    def __init__(
        self,
        fragment: Fragment,
        moment: OptimizerMoment,
        decay: Callable[[], float],
        compensated: bool,
        device: torch.device | None,
    ) -> None:
        super().__init__(fragment, device)
        self._moment, self._decay = moment, decay
        self._snapshot_decay = 0.0
        self.start = fragment.zeros(self.device) if compensated else None

    def take_snapshot(self) -> None:
        super().take_snapshot()
        self._snapshot_decay = self._decay()  # a scheduler may change it during the exchange

    def next(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> Tensor:
        start = mean
        if self.start is not None:
            b = self._snapshot_decay if self.uses_snapshot else self._decay()
            decay = block_decay(b, block.summary.minibatches, [h.factor for h in block.summary.headers])
            start = self.start[begin:end]
            compensate(mean, start, decay=decay, ahead=b**block.ahead, square=self._moment.square, out=start)
            if self.fragment.dtype != self.dtype:  # the worker starts from the rounded values
                start.copy_(start.to(self.fragment.dtype))
        fold(self.checksum, start)
        return start

    def move(self, begin: int, end: int, made: int) -> None:
        self._shift(begin, end, self._decay() ** made, least=0 if self._moment.square else None)


def moment_states(owned: Owned, choices: Sequence[str], device: torch.device | None) -> list[MomentState]:
    """The outer states of all moments that workers average; creates missing optimizer state."""
    states = []
    for number, ((optimizer, named), choice) in enumerate(zip(owned, choices, strict=True)):
        if choice not in ("average", "compensate"):
            continue
        known = moments(optimizer)
        if not known:
            raise UnsupportedError(
                f"the state of {type(optimizer).__name__} cannot be averaged: only Adam, AdamW, SGD and "
                'Muon are known; use local_state="keep" or "reset"'
            )
        for _, parameter in named:
            ensure_state(optimizer, parameter)
        for moment in known:
            key = f"{moment.key}.{number}"
            states += _states_of(key, optimizer, named, moment, choice == "compensate", device)
    return states


def _states_of(
    key: str,
    optimizer: Optimizer,
    named: Named,
    moment: OptimizerMoment,
    compensated: bool,
    device: torch.device | None,
) -> list[MomentState]:
    """One outer state for each parameter group (betas may differ), dtype and device."""
    by_name = dict(named)

    def find(names: list[str]) -> list[Tensor]:
        found = []
        for name in names:
            ensure_state(optimizer, by_name[name])  # a loaded or cleared state may lack it
            state = parameter_state(optimizer, by_name[name], moment.key)
            assert state is not None
            found.append(state)
        return found

    states = []
    for place, group in enumerate(optimizer.param_groups):
        members = {id(p) for p in group["params"]}
        names = [name for name, p in named if id(p) in members]
        pairs = list(zip(names, find(names), strict=True))
        decay = lambda place=place: moment.decay(optimizer.param_groups[place])  # noqa: E731
        parts = fragments(f"{key}.{place}", pairs, find)
        states += [MomentState(fragment, moment, decay, compensated, device) for fragment in parts]
    return states


class BufferState(OuterState):
    """Floating-point running statistics, such as BatchNorm's: averaged."""

    def __init__(self, fragment: Fragment, device: torch.device | None) -> None:
        super().__init__(fragment, device)
        self.start = self.exported = fragment.whole(self.device)  # the global values

    def next(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> Tensor:
        start = self.exported[begin:end].copy_(mean)
        fold(self.checksum, start)
        return start

    def prepare(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> None:
        self.next(begin, end, mean, block)

    def move(self, begin: int, end: int, made: int) -> None:
        now = self.fragment.read(begin, end, self.scratch(3, end - begin))
        self.fragment.write(begin, end, torch.lerp(self.exported[begin:end], now, 0.5))

    def reset_nonfinite(self) -> None:
        """Reset to the last values that all took, if a number is inf or nan."""
        if self.device.type == "cpu":
            self.fragment.reset_nonfinite(self.exported)
        else:  # the device decides by itself: the host reads nothing while work is queued
            now = self.fragment.whole(self.device)
            self.fragment.write(0, self.numel, self.fragment.without_nonfinite(now, self.exported))


class CounterState(BufferState):
    """Integer buffers, such as BatchNorm's count of batches: the mean of the workers' increments."""

    def weight(self, summary: ExchangeSummary) -> float:
        return float(sum(summary.minibatches))

    def factor(self, factor: float, minibatches: int) -> float:
        return float(minibatches) if factor else 0.0

    def contribute(self, begin: int, end: int, out: Tensor) -> None:
        torch.sub(self.values(begin, end), self.exported[begin:end], out=out)

    def next(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> Tensor:
        start = self.exported[begin:end].add_(mean)
        fold(self.checksum, start)
        return start

    prepare, move = OuterState.prepare, OuterState.move


class CopiedState(BufferState):
    """Buffers of which all workers take rank 0's."""

    def __init__(self, fragment: Fragment, device: torch.device | None, world: Callable[[], World]) -> None:
        super().__init__(fragment, device)
        self._world = world
        self._exchanges = 0
        self._named: set[str] = set()

    def weight(self, summary: ExchangeSummary) -> float:
        return 1.0

    def factor(self, factor: float, minibatches: int) -> float:
        return 1.0

    def next(self, begin: int, end: int, mean: Tensor, block: BlockEnd) -> Tensor:
        self._exchanges += begin == 0
        world = self._world()
        often = self._exchanges & (self._exchanges - 1) == 0  # the first, second, fourth, ..: it costs next to nothing
        if often and world.rank == 1:
            apart = names_apart(self.fragment, begin, self.values(begin, end), mean)
            say_apart(world, [name for name in apart if name not in self._named])
            self._named.update(apart)
        return super().next(begin, end, mean, block)

    def move(self, begin: int, end: int, made: int) -> None:
        if self._world().rank:  # rank 0 goes on from its own
            self.fragment.write(begin, end, self.exported[begin:end])


def names_apart(fragment: Fragment, begin: int, own: Tensor, taken: Tensor) -> list[str]:
    """Which floating-point tensors of a fragment differ, from element `begin` on, from what was taken."""
    if not fragment.outer_dtype.is_floating_point:
        return []
    cuts = [(s.name, max(0, s.offset - begin), min(own.numel(), s.end - begin)) for s in fragment.slots]
    return [name for name, low, high in cuts if low < high and not torch.equal(own[low:high], taken[low:high])]


def say_apart(world: World, names: list[str]) -> None:
    """Say that these buffers are rank 0's."""
    if names:
        text = (
            "each worker writes its own values into buffers, and all take rank 0's, as under DistributedDataParallel: "
            f"{', '.join(names)}. Only running statistics of torch's BatchNorm and InstanceNorm are averaged"
        )
        logger.warning("%s", world.sign(text))


def buffer_states(model: Modules, device: torch.device | None, world: Callable[[], World]) -> list[BufferState]:
    """The outer states of the model's buffers, one for each kind, dtype and device."""

    def state_of(part: Fragment) -> BufferState:
        if part.from_rank_0:
            return CopiedState(part, device, world)
        return (BufferState if part.outer_dtype.is_floating_point else CounterState)(part, device)

    return [state_of(part) for part in buffer_fragments(model)]


NO_BLOCK = Coefficients(0.0, 1.0, 0.0, 0.0)
"""Of buffers that are exchanged with gradients: no outer step."""


class OuterStateChunk:
    """A range of an outer state as a chunk of an exchange, in the memory `wire`, shape (at least end - begin,);
    `numbers`: of the block, read when it is packed and when it lands; None for buffers without one."""

    def __init__(self, outer: OuterState, begin: int, end: int, wire: Tensor, numbers: BlockNumbers | None) -> None:
        self.outer, self.begin, self.end = outer, begin, end
        self.layout = outer.layout if end - begin == outer.numel else outer.layout.cut(begin, end)
        self.lossless = outer.lossless
        self.from_rank_0 = outer.fragment.from_rank_0
        self.state: State = {}
        self.packed = False  # whether the wire memory holds the contribution already, for the next `fill` only
        self._wire, self._numbers = wire[: end - begin], numbers

    def space(self, low: int, high: int) -> Tensor:
        return self._wire[low - self.begin : high - self.begin]

    def _blocks(self) -> list[tuple[int, int]]:
        size = self.outer.block_elements
        return [(low, min(self.end, low + size)) for low in range(self.begin, self.end, size)]

    @torch.no_grad()
    def fill(self, factor: float) -> Tensor:
        factor = self.outer.factor(factor, self._numbers.minibatches if self._numbers is not None else 1)
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
        self._each(total, summary, self.outer.apply)

    def prepare(self, total: Tensor, summary: ExchangeSummary) -> None:
        self._each(total, summary, self.outer.prepare)

    @torch.no_grad()
    def move(self, made: int) -> None:
        for low, high in self._blocks():
            self.outer.move(low, high, made)

    @torch.no_grad()
    def _each(self, total: Tensor, summary: ExchangeSummary, use: Callable[[int, int, Tensor, BlockEnd], None]) -> None:
        weight = self.outer.weight(summary)
        numbers = self._numbers
        block = numbers.end(summary) if numbers is not None else BlockEnd(NO_BLOCK, 0.0, 0.0, Diversity(), summary)
        integers = total.dtype == torch.int64
        for (low, high), mean in zip(self._blocks(), torch.split(total, self.outer.block_elements), strict=True):
            if integers:
                mean = torch.div(mean, int(weight), rounding_mode="floor")
            elif weight != 1:  # into scratch, which stays in the cache
                mean = torch.div(mean, weight, out=self.outer.scratch(2, high - low))
            use(low, high, mean, block)


def restored(saved: State, device: torch.device) -> State:
    """A codec's state from a checkpoint, copied to `device`."""
    return {name: tensor.to(device, copy=True) for name, tensor in saved.items()}


def shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def cut_states(
    states: Sequence[OuterState], exchanger: Exchanger, numbers: BlockNumbers, measured: bool
) -> list[OuterStateChunk]:
    """Cut all outer states of a fragment into chunks; `measured`: whether the norms of contributions are taken.

    In host memory each chunk of parameters has its own wire memory, so that the pass that takes the norm packs all of
    them; so has each chunk of an exchange that keeps its contribution. Other chunks share a few wire buffers.
    """
    pieces: list[tuple[OuterState, int, int]] = []
    total = sum(state.numel for state in states)
    codec, overlapped = numbers.rule.codec, numbers.rule.schedule.overlap > 0
    for state in states:
        wanted = max(1, round(exchanger.chunks * state.numel / max(total, 1)))
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
    """Cut a flat tensor into at most `pieces` ranges of about one length, as suits the codec; fewer if it is small."""
    least = SMALL_ELEMENTS * coarse if codec.exact else SMALL_CODED  # a lossy codec's loss depends on the cuts
    numel = layout.numel
    pieces = max(1, min(pieces, numel // least))
    if not codec.whole:
        if pieces == 1:
            return [(0, numel)]
        length = -(-numel // pieces // 64) * 64  # offsets aligned for every dtype
        return [(begin, min(numel, begin + length)) for begin in range(0, numel, length)]
    ranges, begin = [], 0
    for matrix in layout.matrices:
        if matrix.end - begin >= -(-numel // pieces) or matrix.end == numel:
            ranges.append((begin, matrix.end))
            begin = matrix.end
    return ranges
