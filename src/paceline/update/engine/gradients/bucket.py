# SPDX-License-Identifier: Apache-2.0
"""A gradient bucket: the gradients of some parameters in one flat tensor, and its ranges as chunks of an exchange."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core.flat import Fragment, local
from paceline.errors import UnsupportedError
from paceline.rules.codec import Layout, State
from paceline.update.engine.blocks.chunks import shares_memory
from paceline.update.engine.blocks.outer_state import LARGEST
from paceline.update.engine.gradients.payloads import GradientReader, PayloadReader
from paceline.update.exchange.header import ExchangeSummary


class GradientBucket:
    """The gradients of a fragment's parameters, end to end.

    A codec may keep its residual in the memory that it was given. Then two flat tensors alternate: one is filled and
    becomes the residual, the other held the last residual and receives the mean.

    Args:
        fragment: the parameters.
        lossless: whether the codec is exact.
    """

    def __init__(self, fragment: Fragment, lossless: bool) -> None:
        self.fragment, self.lossless = fragment, lossless
        self.reader: PayloadReader = GradientReader()
        self.wire = torch.zeros(fragment.numel, dtype=fragment.outer_dtype, device=fragment.device)
        shapes = [local(tensor).shape for tensor in fragment.tensors]
        self.layout = Layout.of(
            shape if math.prod(shape) == slot.numel else (slot.numel,)
            for shape, slot in zip(shapes, fragment.slots, strict=True)
        )
        self.has = [False] * len(fragment.tensors)
        self.missing = [0.0] * len(fragment.tensors)
        """Of each parameter, the share of the workers without a gradient, if any worker has one."""
        self.takes_norm = False
        """Whether norms are taken; else a sum finds inf and nan at half the cost."""
        self._finite, self._square = True, 0.0
        self._unread: list[Tensor] = []  # of each chunk on an accelerator, its largest magnitude and its norm, (2,)
        self._packed = 0
        self.muted = False
        self._taken: list[tuple[int, int] | None] = []
        self._other: Tensor | None = None
        self._swap = False
        self._views: dict[int, list[Tensor]] = {}

    @property
    def other(self) -> Tensor:
        """The flat tensor that is not being sent."""
        if self._other is None:
            self._other = torch.zeros_like(self.wire)
        return self._other

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
        """Forget what was packed."""
        self._packed, self._finite, self._square, self._unread = 0, True, 0.0, []
        self._taken, self.missing = [], [0.0] * len(self.has)

    def is_packed(self, number: int) -> bool:
        """Whether the gradient of that parameter has been packed."""
        return number < self._packed

    @property
    def finite(self) -> bool:
        """Whether the packed gradients are finite; on an accelerator this waits for them."""
        self._read()
        return self._finite

    @property
    def square(self) -> float:
        """The square of the norm of the packed gradients, if norms are taken; waits as `finite` does."""
        self._read()
        return self._square

    def _read(self) -> None:
        """Read what `check` left on the accelerator: once for all chunks, when backward has queued its work."""
        unread, self._unread = self._unread, []
        for greatest, norm in torch.stack(unread).tolist() if unread else ():
            self._found(math.isfinite(greatest), norm)

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
        while self._packed < len(slots) and slots[self._packed].offset < end:
            number = self._packed
            gradient = None if self.muted else self.reader.read(self.fragment.tensors[number])
            self._taken.append(_mark(self.fragment.tensors[number].grad))
            self.has[number] = gradient is not None
            if gradient is None:
                views[number].zero_()
            else:
                self._refuse_sparse(number, gradient)
                targets.append(views[number])
                sources.append(local(gradient))
            self._packed += 1
        if targets:
            torch._foreach_copy_(targets, sources)

    def changed(self) -> bool:
        """Whether a gradient changed after it was packed, for example by a hook of the user's."""
        return any(_mark(tensor.grad) != mark for tensor, mark in zip(self.fragment.tensors, self._taken, strict=False))

    def _refuse_sparse(self, number: int, gradient: Tensor) -> None:
        if gradient.is_sparse:
            raise UnsupportedError(
                f"{self.fragment.names[number]} has a sparse gradient, which has no flat form; use sparse=False in its "
                "embedding, or a rule that exchanges blocks (averaging, bmuf, diloco)"
            )

    def receive(self, begin: int, end: int, total: Tensor, weight: float, aliased: bool) -> None:
        """Take the mean of a range, in the sent memory or, if that holds a residual now, in the other tensor."""
        self._swap = self._swap or aliased
        target = (self.other if aliased else self.wire)[begin:end]
        if weight != 1:
            torch.div(total, weight, out=target)
        elif total.data_ptr() != target.data_ptr():
            target.copy_(total)

    @property
    def mean(self) -> Tensor:
        """The flat tensor with the mean, between `receive` and `unpack`."""
        return self.other if self._swap else self.wire

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
            self.wire, self._other, self._swap = self.other, self.wire, False

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
    """A range of a bucket.

    Args:
        bucket: the bucket.
        begin, end: the range (excl.).
    """

    def __init__(self, bucket: GradientBucket, begin: int, end: int) -> None:
        self.bucket, self.begin, self.end = bucket, begin, end
        self.lossless, self.from_rank_0 = bucket.lossless, False
        self.layout = bucket.layout.cut(begin, end)
        self.state: State = {}
        slots = bucket.fragment.slots
        numbers = [n for n, slot in enumerate(slots) if slot.offset < end and slot.end > begin]
        self.first, self.last = (numbers[0], numbers[-1]) if numbers else (0, len(slots) - 1)
        self._aliased = False

    def holds(self, number: int) -> bool:
        """Whether the range holds a part of that parameter's gradient."""
        return self.first <= number <= self.last

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
        """Take the codec's state."""
        self._aliased = any(shares_memory(tensor, self.bucket.wire) for tensor in state.values())
        self.state = state

    def prepare(self, total: Tensor, summary: ExchangeSummary) -> None:
        """Never called: gradients are used in their own step."""
        raise AssertionError("a gradient exchange never overlaps the next steps")

    def move(self, made: int) -> None:
        """Never called, as `prepare`."""
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
        """Take the mean."""
        self.bucket.receive(self.begin, self.end, total, summary.weight, self._aliased)
