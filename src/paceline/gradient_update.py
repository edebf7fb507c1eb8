# SPDX-License-Identifier: Apache-2.0
"""Gradient payloads: the workers' mean gradient takes the place of each worker's own, before the optimizer's step.

Serves synchronous rules, and the synchronous warm-up of block rules. Knows no method by name.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from paceline.errors import UnsupportedError
from paceline.exchange import Chunk, Exchanger, Header, Meeting, combine, fold
from paceline.fragments import Fragment, Modules, fragments, local
from paceline.lanes import LaneChunk, Moves, buffer_lanes
from paceline.outer.base import Coefficients
from paceline.rule import Rule
from paceline.update import Named, Work, cut

CHECK_EVERY = 64
"""The replicas' bits are compared at every 64th exchange."""


def _no_moves(meeting: Meeting) -> Moves:
    """Buffers are averaged and know of no outer step."""
    return Moves(Coefficients(0.0, 1.0, 0.0, 0.0), 0.0)


class _GradientChunk:
    """A range of the flat gradient; packed and unpacked as a whole by its owner."""

    def __init__(self, wire: Tensor) -> None:
        self._wire = wire

    def fill(self, factor: float) -> Tensor:
        if factor == 0:
            return self._wire.zero_()
        return self._wire if factor == 1 else self._wire.mul_(factor)

    def land(self, total: Tensor, meeting: Meeting) -> None:
        if meeting.weight != 1:
            total.div_(meeting.weight)


class GradientUpdate:
    """Gradient payloads of one optimizer: the mean gradient takes the place of the worker's own.

    Args:
        rule: the rule (its codec and route).
        exchanger: the connection.
        kind: which optimizer, 1 + its number.
        named: its parameters.
        model: whose buffers are averaged along with these gradients; None where another optimizer's carry them.
    """

    def __init__(self, rule: Rule, exchanger: Exchanger, kind: int, named: Named, model: Modules | None) -> None:
        self._rule, self._exchanger, self.kind = rule, exchanger, kind
        self.parts = [_FlatGradient(fragment, exchanger) for fragment in fragments("parameters", named)]
        self._chunks: list[Chunk] = []
        for part in self.parts:
            wanted = rule.topology.chunks
            self._chunks += [_GradientChunk(part.wire[b:e]) for b, e in cut(part.fragment.numel, wanted)]
        self.buffer_lanes = buffer_lanes(model, None) if model is not None else []
        for lane in self.buffer_lanes:
            wire = torch.zeros(lane.numel, dtype=lane.dtype, device=exchanger.transport.wire_device(lane.device))
            self._chunks.append(LaneChunk(lane, 0, lane.numel, wire, lambda: 1, _no_moves))
        self._exchanges = 0

    def chunks(self) -> list[Chunk]:
        """What travels; a worker without a gradient sends zeros."""
        return self._chunks

    @torch.no_grad()
    def exchange(self, work: Work) -> Meeting:
        """Replace the gradients by the workers' mean, weighted by `work.factor`; before the optimizer's step.

        A gradient that no worker has stays absent. Raises as `BlockUpdate.exchange` does.
        """
        for part in self.parts:
            part.pack()
        for lane in self.buffer_lanes:
            lane.fragment.refresh()
        finite = all(bool(torch.isfinite(part.wire.sum())) or part.all_finite() for part in self.parts)
        finite = finite and all(lane.fragment.finite() for lane in self.buffer_lanes)
        presence = "".join("1" if has else "0" for part in self.parts for has in part.has)
        self._exchanges += 1
        checked = self._exchanges % CHECK_EVERY == 0
        meeting = self._exchanger.meet(
            Header(
                sequence=self._exchanger.sequence + 1,
                kind=self.kind,
                brings=True,
                leaving=work.leaving,
                finite=finite,
                minibatches=1,
                presence=zlib.crc32(presence.encode()),
                factor=work.factor if finite else 0.0,
                total=work.total,
                checksum=self.checksum() if checked else 0,
            ),
            lambda kind: self._chunks,
        )
        if len({h.presence for h in meeting.headers if h.brings}) > 1:
            self._share_presence()
        for part in self.parts:
            part.unpack()
        return meeting

    def _share_presence(self) -> None:
        """Workers have gradients for different parameters: whoever lacks one that another has takes it too."""
        marks = torch.tensor([float(has) for part in self.parts for has in part.has])
        device = self._exchanger.transport.wire_device(marks.device)
        everybody = marks.to(device)
        self._exchanger.transport.all_reduce(everybody).wait()
        flags = iter((everybody > 0).tolist())
        for part in self.parts:
            part.has = [next(flags) for _ in part.has]

    def join_empty(self, meeting: Meeting) -> None:
        """After a payload in which this worker had no part: keep in step with `_share_presence`."""
        if len({h.presence for h in meeting.headers if h.brings}) > 1:
            for part in self.parts:
                part.has = [False] * len(part.has)
            self._share_presence()

    def checksum(self) -> int:
        """Of the parameters, which all workers hold alike."""
        return combine(part.checksum() for part in self.parts)


class _FlatGradient:
    """The gradients of a fragment's parameters, end to end."""

    def __init__(self, fragment: Fragment, exchanger: Exchanger) -> None:
        self.fragment = fragment
        device = exchanger.transport.wire_device(fragment.device)
        self.wire = torch.zeros(fragment.numel, dtype=fragment.outer_dtype, device=device)
        self.has = [False] * len(fragment.tensors)
        self._views = []
        for slot, tensor in zip(fragment.slots, fragment.tensors, strict=True):
            flat = self.wire[slot.offset : slot.end]
            shape = local(tensor).shape
            self._views.append(torch.view_as_complex(flat.view(*shape, 2)) if tensor.is_complex() else flat.view(shape))

    def pack(self) -> None:
        """Copy the gradients that are there; zeros for the others."""
        targets, sources = [], []
        for number, (view, parameter) in enumerate(zip(self._views, self.fragment.tensors, strict=True)):
            gradient = parameter.grad
            self.has[number] = gradient is not None
            if gradient is None:
                view.zero_()
                continue
            if gradient.is_sparse:
                name = self.fragment.names[number]
                raise UnsupportedError(
                    f"{name} has a sparse gradient, which has no flat form; use sparse=False in its embedding, "
                    "or a rule that exchanges blocks (averaging, bmuf, diloco)"
                )
            targets.append(view)
            sources.append(local(gradient))
        if targets:
            torch._foreach_copy_(targets, sources)

    def checksum(self) -> Tensor:
        """Of the parameters' bits, int64, shape ()."""
        total = torch.zeros((), dtype=torch.int64, device=self.fragment.device)
        for tensor in self.fragment.tensors:
            fold(total, local(tensor).contiguous().view(-1))
        return total

    def all_finite(self) -> bool:
        """The slow, certain answer, for when a sum overflowed."""
        return bool(torch.isfinite(self.wire).all())

    def unpack(self) -> None:
        """Copy the mean to the gradients; make those that this worker lacked and another had."""
        targets, sources = [], []
        for has, view, parameter in zip(self.has, self._views, self.fragment.tensors, strict=True):
            if not has:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            targets.append(local(parameter.grad))
            sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
