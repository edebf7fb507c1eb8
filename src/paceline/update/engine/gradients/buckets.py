# SPDX-License-Identifier: Apache-2.0
"""The gradients of an optimizer, laid out for the wire in the order in which they become ready: which tensor of each
parameter is exchanged before a step (its reader), the buckets, and their ranges as chunks of an exchange."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from paceline.communication import Transport
from paceline.core.flat import Fragment, fragments, local
from paceline.core.optimizer_state import Named, ensure_state
from paceline.errors import UnsupportedError
from paceline.rules.codec import Codec, Layout, State
from paceline.rules.outer.frozen_adam import frozen_step
from paceline.update.engine.blocks.outer_state import LARGEST, BufferState, OuterStateChunk, cut, shares_memory
from paceline.update.exchange.exchanger import ExchangeSummary, combine, of_tensors


class GradientReader:
    """The payload of a step: the gradient, replaced by the mean."""

    def read(self, parameter: Tensor) -> Tensor | None:
        """This worker's contribution, of the parameter's shape, or None."""
        return parameter.grad

    def target(self, parameter: Tensor) -> Tensor:
        """The memory for the mean, created if it does not exist."""
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        return local(parameter.grad)

    def completed(self, parameter: Tensor, mean: Tensor, missing: float) -> Tensor:
        """The mean, if the share `missing` of the workers had no gradient and sent zeros: they count as zero."""
        return mean


class FirstMomentReader(GradientReader):
    """Adam's first moment; the optimizer's own step is taken in its place, with the second moment frozen."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        return next(g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"]))

    @torch.no_grad()
    def read(self, parameter: Tensor) -> Tensor | None:
        """b1 m + (1 - b1) g."""
        return None if parameter.grad is None else self._moment(parameter, parameter.grad)

    def _moment(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The common first moment, updated with this gradient."""
        ensure_state(self._optimizer, parameter)
        group = self._group(parameter)
        gradient = -gradient if group.get("maximize") else gradient
        if group["weight_decay"] and not self._decoupled(group):
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        return torch.lerp(self._optimizer.state[parameter]["exp_avg"], gradient, 1 - float(group["betas"][0]))

    def _decoupled(self, group: dict[str, Any]) -> bool:
        return isinstance(self._optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))

    def target(self, parameter: Tensor) -> Tensor:
        ensure_state(self._optimizer, parameter)
        return local(self._optimizer.state[parameter]["exp_avg"])

    @torch.no_grad()
    def completed(self, parameter: Tensor, mean: Tensor, missing: float) -> Tensor:
        """A worker without a gradient contributes the common moment, aged by a step."""
        return torch.add(mean, local(self._moment(parameter, torch.zeros_like(parameter))), alpha=missing)

    def step(self, present: list[Tensor], since: int) -> None:
        """Make the step of the parameters that have a moment, and hide their gradients from the optimizer; `since`:
        steps since the second moment was frozen, this one included."""
        for parameter in present:
            group, state = self._group(parameter), self._optimizer.state[parameter]
            frozen_at = float(state["step"])
            frozen_step(
                parameter,
                state["exp_avg"],
                state["exp_avg_sq"],
                group,
                decay=float(group["weight_decay"]) if self._decoupled(group) else 0.0,
                step=int(frozen_at) + since,
                frozen_at=max(frozen_at, 1.0),
            )
        self._hidden = [(p, p.grad) for p in present if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def show(self) -> None:
        """Restore the gradients, after the optimizer's step."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []


class GradientBucket:
    """The gradients of a fragment's parameters, end to end.

    A codec may keep its residual in the memory that it was given. Then two flat tensors alternate: one is filled and
    becomes the residual, the other held the last residual and receives the mean.
    """

    def __init__(self, fragment: Fragment, lossless: bool, takes_norm: bool) -> None:
        self.fragment, self.lossless = fragment, lossless
        self.reader = GradientReader()
        self.wire = torch.zeros(fragment.numel, dtype=fragment.outer_dtype, device=fragment.device)
        self.layout = Layout.of(s.shape if math.prod(s.shape) == s.numel else (s.numel,) for s in fragment.slots)
        self.has = [False] * len(fragment.tensors)
        self.missing = [0.0] * len(fragment.tensors)  # the share of the workers without one, if any worker has it
        self.takes_norm = takes_norm  # else a sum finds inf and nan at half the cost
        self._finite, self._square = True, 0.0
        self._unread: list[Tensor] = []  # of each chunk on an accelerator, its largest magnitude and its norm, (2,)
        self.packed = 0  # gradients, in their order
        self.muted = False
        self._taken: list[tuple[int, int] | None] = []
        self._other: Tensor | None = None
        self._swap = False
        self._views: dict[int, list[Tensor]] = {}

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """The flat tensor in the parameters' shapes."""
        found = self._views.get(flat.data_ptr())
        if found is None:
            found = []
            for slot, tensor in zip(self.fragment.slots, self.fragment.tensors, strict=True):
                part, shape = flat[slot.offset : slot.end], local(tensor).shape
                found.append(torch.view_as_complex(part.view(*shape, 2)) if tensor.is_complex() else part.view(shape))
            self._views[flat.data_ptr()] = found
        return found

    def forget(self) -> None:
        self.packed, self._finite, self._square, self._unread = 0, True, 0.0, []
        self._taken, self.missing = [], [0.0] * len(self.has)

    def measured(self) -> tuple[bool, float]:
        """Whether the packed gradients are finite, and the square of their norm, if norms are taken.

        On an accelerator it waits for them: once for all chunks, when backward has queued its work.
        """
        unread, self._unread = self._unread, []
        for greatest, norm in torch.stack(unread).tolist() if unread else ():
            self._found(math.isfinite(greatest), norm)
        return self._finite, self._square

    def _found(self, finite: bool, norm: float) -> None:
        self._finite = self._finite and finite
        if self.takes_norm and finite:
            self._square += (norm if math.isfinite(norm) else LARGEST) ** 2  # the squares may have overflowed

    @torch.no_grad()
    def check(self, x: Tensor) -> None:
        """Make zeros of `x`, a packed range, if it is not finite; the footer reports it."""
        if x.device.type == "cpu":
            norm = float(torch.linalg.vector_norm(x) if self.takes_norm else x.sum())
            finite = math.isfinite(norm) or bool(torch.isfinite(x).all())
            self._found(finite, norm)
            if not finite:
                x.zero_()
            return
        # Reading a value would stop the queue of the backward pass here, so the device decides by itself.
        greatest = torch.linalg.vector_norm(x, math.inf)
        self._unread.append(torch.stack([greatest, torch.linalg.vector_norm(x) if self.takes_norm else greatest]))
        x.masked_fill_(~torch.isfinite(greatest), 0)

    @torch.no_grad()
    def pack(self, end: int) -> None:
        """Copy the gradients of all parameters that begin before `end`; zeros for absent ones."""
        targets, sources = [], []
        views, slots = self._views_of(self.wire), self.fragment.slots
        while self.packed < len(slots) and slots[self.packed].offset < end:
            number = self.packed
            gradient = None if self.muted else self.reader.read(self.fragment.tensors[number])
            self._taken.append(_mark(self.fragment.tensors[number].grad))
            self.has[number] = gradient is not None
            if gradient is None:
                views[number].zero_()
            else:
                if gradient.is_sparse:
                    raise UnsupportedError(
                        f"{self.fragment.names[number]} has a sparse gradient, which has no flat form; use "
                        "sparse=False in its embedding, or a rule that exchanges blocks (averaging, bmuf, diloco)"
                    )
                targets.append(views[number])
                sources.append(local(gradient))
            self.packed += 1
        if targets:
            torch._foreach_copy_(targets, sources)

    def changed(self) -> bool:
        """Whether a gradient changed after it was packed, for example by a hook of the user's."""
        return any(_mark(tensor.grad) != mark for tensor, mark in zip(self.fragment.tensors, self._taken, strict=False))

    def receive(self, begin: int, end: int, total: Tensor, weight: float, aliased: bool) -> None:
        """Take the mean of a range, in the sent memory or, if that holds a residual now, in the other tensor."""
        self._swap = self._swap or aliased
        if aliased and self._other is None:
            self._other = torch.zeros_like(self.wire)
        target = (self._other if aliased and self._other is not None else self.wire)[begin:end]
        if weight != 1:
            torch.div(total, weight, out=target)
        elif total.data_ptr() != target.data_ptr():
            target.copy_(total)

    @property
    def mean(self) -> Tensor:
        """The flat tensor with the mean, between `receive` and `unpack`."""
        return self._other if self._swap and self._other is not None else self.wire

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the mean to the gradients; create those that only other workers had."""
        targets, sources = [], []
        found = zip(self.has, self.missing, self._views_of(self.mean), self.fragment.tensors, strict=True)
        for has, missing, view, parameter in found:
            if not has:
                continue
            sources.append(self.reader.completed(parameter, view, missing) if missing else view)
            targets.append(self.reader.target(parameter))
        if targets:
            torch._foreach_copy_(targets, sources)
        if self._swap:
            self.wire, self._other, self._swap = self.mean, self.wire, False

    @torch.no_grad()
    def make_infinite(self) -> None:
        """Make the gradients infinite, so that a GradScaler skips the step."""
        for has, parameter in zip(self.has, self.fragment.tensors, strict=True):
            if has:
                self.reader.target(parameter).fill_(math.inf)


def _mark(gradient: Tensor | None) -> tuple[int, int] | None:
    """A mark that changes with the gradient."""
    if gradient is None:
        return None
    return (gradient._version, 0 if gradient.is_sparse else local(gradient).data_ptr())


class GradientChunk:
    """A range of a bucket."""

    def __init__(self, bucket: GradientBucket, begin: int, end: int) -> None:
        self.bucket, self.begin, self.end = bucket, begin, end
        self.lossless, self.from_rank_0 = bucket.lossless, False
        self.layout = bucket.layout.cut(begin, end)
        self.state: State = {}
        slots = bucket.fragment.slots
        numbers = [n for n, slot in enumerate(slots) if slot.offset < end and slot.end > begin]
        self.first, self.last = (numbers[0], numbers[-1]) if numbers else (0, len(slots) - 1)
        self._aliased = False

    @torch.no_grad()
    def fill(self, factor: float) -> Tensor:
        """This worker's gradient times the factor; zeros if it is not finite, which the footer reports."""
        self.bucket.pack(self.end)
        x = self.bucket.wire[self.begin : self.end]
        if factor == 0:
            return x.zero_()
        self.bucket.check(x)
        return x if factor == 1 else x.mul_(factor)

    def keep(self, state: State) -> None:
        self._aliased = any(shares_memory(tensor, self.bucket.wire) for tensor in state.values())
        self.state = state

    def prepare(self, total: Tensor, summary: ExchangeSummary) -> None:
        raise AssertionError("a gradient exchange never overlaps the next steps")

    def move(self, made: int) -> None:
        raise AssertionError("a gradient exchange never overlaps the next steps")

    @torch.no_grad()
    def take_back(self, weight: float) -> None:
        """Apply nothing to parameters without a gradient on any worker; put their mean back into the residual."""
        residual = self.state.get("residual")
        if residual is None or residual.numel() != self.end - self.begin:
            return
        for number in range(self.first, self.last + 1):
            slot = self.bucket.fragment.slots[number]
            if not self.bucket.has[number]:
                low, high = max(slot.offset, self.begin), min(slot.end, self.end)
                owed = residual[low - self.begin : high - self.begin]
                owed.add_(self.bucket.mean[low:high].to(owed.device), alpha=weight)

    def land(self, total: Tensor, summary: ExchangeSummary) -> None:
        self.bucket.receive(self.begin, self.end, total, summary.weight, self._aliased)


class GradientBuckets:
    """A bucket for each dtype and device, cut into chunks, and the buffers that are exchanged with them."""

    def __init__(
        self, named: Named, buffers: Sequence[BufferState], codec: Codec, chunks: int, transport: Transport, norms: bool
    ) -> None:
        self._named, self._buffers, self._codec = named, buffers, codec
        self._wanted, self._transport, self._norms = chunks, transport, norms
        self.clear()

    def clear(self) -> None:
        self.order: list[int] = []  # the parameters' numbers in the order of the layout; empty before `build`
        self.buckets: list[GradientBucket] = []
        self.chunks: list[GradientChunk] = []  # in the order in which their last gradients become ready
        self.buffer_chunks: list[OuterStateChunk] = []
        self.place: list[tuple[int, int]] = []  # of each parameter, its bucket and its number there
        self.chunks_of: list[list[int]] = []  # of each parameter, the numbers of the chunks that hold its gradient

    def build(self, order: Sequence[int]) -> None:
        """Lay out the parameters in this order of their numbers."""
        self.clear()
        codec, elements = self._codec, sum(p.numel() for _, p in self._named)
        self.order = list(order)
        index_of = {id(p): index for index, (_, p) in enumerate(self._named)}
        self.place = [(0, 0)] * len(self.order)
        last_of: list[tuple[int, GradientChunk]] = []
        for place, fragment in enumerate(fragments("parameters", [self._named[index] for index in self.order])):
            bucket = GradientBucket(fragment, codec.exact, self._norms)
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
            self.buffer_chunks.append(OuterStateChunk(state, 0, state.numel, wire, None))
        self.chunks_of = [
            [
                k
                for k, chunk in enumerate(self.chunks)
                if chunk.bucket is self.buckets[place] and chunk.first <= number <= chunk.last
            ]
            for place, number in self.place
        ]

    # -- contents ---------------------------------------------------------------------------------

    def measured(self) -> tuple[bool, float]:
        """Whether all packed gradients are finite, and their norm, if norms are taken."""
        results = [bucket.measured() for bucket in self.buckets]
        return all(finite for finite, _ in results), math.sqrt(sum(square for _, square in results))

    def checksum(self) -> int:
        """Checksum of the parameters, which are equal on all workers."""
        return combine(of_tensors(bucket.fragment) for bucket in self.buckets)

    def start(self, reader: GradientReader | None = None) -> None:
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
        return zlib.crc32(bytes(self.buckets[place].has[number] for place, number in self.place))

    def share_presence(self, summary: ExchangeSummary) -> None:
        """If workers have gradients of different parameters, each takes all of them."""
        weight = summary.headers[self._transport.world.rank].factor
        marks = torch.tensor([[float(has), weight * has] for bucket in self.buckets for has in bucket.has])
        gathered = marks.to(self._transport.wire_device(marks.device))
        self._transport.all_reduce(gathered).wait()
        rows = iter(gathered.tolist())
        for bucket in self.buckets:
            shared = [next(rows) for _ in bucket.has]
            bucket.has = [having > 0 for having, _ in shared]
            bucket.missing = [max(0.0, 1 - have / summary.weight) if summary.weight else 0.0 for _, have in shared]
