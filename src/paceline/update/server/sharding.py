# SPDX-License-Identifier: Apache-2.0
"""The parameters of an optimizer's groups end to end, in host memory, and the shards into which they are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.flat import Fragment, flat_view, fragments, local
from paceline.core.optimizer_state import Named
from paceline.errors import UnsupportedError
from paceline.rules.topology.sharded import Cut, Sharded
from paceline.update.server.protocol import ShardRequest
from paceline.update.server.shard_updates import LOCAL_SETTINGS, GroupSettings

Group = Callable[[], dict[str, Any]]


@dataclass
class ShardRange:
    """A shard's place in its span.

    Attributes:
        number: the same on all workers.
        cut: its elements and its owner.
        version: of the values that were pulled last.
        computed_at: version at which the next push is computed.
    """

    number: int
    cut: Cut
    version: int = 0
    computed_at: int = 0


class Span:
    """Tensors of one kind end to end, with the values that were pulled last.

    Attributes:
        number: the same on all workers.
        fragment: the tensors.
        ranges: its shards.
        pulled: the values that were pulled last, in host memory: the global model as this worker knows it.
        incoming: memory for answers.
    """

    def __init__(self, number: int, fragment: Fragment, group: Group | None, cuts: list[Cut], first: int) -> None:
        self.number, self.fragment, self._group = number, fragment, group
        self.ranges = [ShardRange(first + k, cut) for k, cut in enumerate(cuts)]
        self.pulled = host(fragment)
        self.incoming = host(fragment)
        self.exported = self.pulled  # for exports of the global model
        self.numel = fragment.numel

    def read(self, out: Tensor) -> Tensor:
        """Copy the tensors to `out`, host memory, shape (numel,)."""
        self.fragment.refresh()
        if self.fragment.device.type == "cpu":
            return self.fragment.whole(out=out)
        return out.copy_(self.fragment.whole())

    def write(self, values: Tensor) -> None:
        """Write values, shape (numel,), to the tensors."""
        self.fragment.refresh()
        self.fragment.write(0, self.numel, values.to(self.fragment.device, non_blocking=True))

    @torch.no_grad()
    def changed(self) -> list[str]:
        """The tensors that do not hold the values that were pulled last."""
        part, result = self.fragment, []
        for slot, tensor in zip(part.slots, part.tensors, strict=True):
            now = flat_view(slot.name, tensor)
            if not torch.equal(now, self.pulled[slot.offset : slot.end].to(now.device, now.dtype)):
                result.append(slot.name)
        return result

    def settings(self) -> GroupSettings:
        """The optimizer group's settings at present, as JSON types."""
        if self._group is None:
            return {}
        return {k: _plain(v) for k, v in self._group().items() if k not in LOCAL_SETTINGS and _is_plain(v)}

    def requests(self, values: Tensor | None, answered: bool = True) -> Iterator[ShardRequest]:
        """A request to each shard, which pushes `values`, shape (numel,), if given, and pulls if `answered`."""
        for one in self.ranges:
            low, high = one.cut.begin, one.cut.end
            pushed = None if values is None else values[low:high]
            out = self.incoming[low:high] if answered else None
            yield ShardRequest(one.number, self.number, pushed, out, one.computed_at)

    def note_version(self) -> None:
        """Note that the next push is computed at the values pulled last, whatever answer arrives before it."""
        for one in self.ranges:
            one.computed_at = one.version

    def take(self, requests: dict[int, ShardRequest]) -> None:
        """Make the values that arrived the ones pulled last."""
        self.pulled, self.incoming = self.incoming, self.pulled
        self.exported = self.pulled
        for one in self.ranges:
            one.version = requests[one.number].version


class BufferPool:
    """Flat tensors of a fragment's size in host memory, reused between pushes."""

    def __init__(self, fragment: Fragment) -> None:
        self._fragment = fragment
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """A free tensor, shape (numel,)."""
        return self._free.pop() if self._free else host(self._fragment)

    def give(self, flat: Tensor) -> None:
        """Return a tensor to the pool, from any thread."""
        self._free.append(flat)


def host(fragment: Fragment) -> Tensor:
    """Zeros for a fragment's values in host memory; pinned where the model is on CUDA."""
    return fragment.zeros(torch.device("cpu"))


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class ShardLayout:
    """The spans and shards of parameters and buffers, the same on all workers.

    Args:
        topology: how a span is cut.
        workers: N.
    """

    def __init__(self, topology: Sharded, workers: int) -> None:
        self._topology, self._workers = topology, workers
        self.spans: list[Span] = []
        self.owners: dict[int, int] = {}

    def add(self, fragment: Fragment, group: Group | None) -> Span:
        """Cut a fragment into shards."""
        cuts = self._topology.pieces(fragment.numel, self._workers)
        span = Span(len(self.spans), fragment, group, cuts, len(self.owners))
        self.owners |= {one.number: one.cut.owner for one in span.ranges}
        self.spans.append(span)
        return span

    def add_optimizer(self, optimizer: Optimizer, named: Named) -> list[Span]:
        """The parameters of an optimizer, group by group."""
        names = {id(parameter): name for name, parameter in named}
        result = []
        for k, group in enumerate(optimizer.param_groups):
            pairs = [(names[id(p)], p) for p in group["params"] if id(p) in names and p.numel()]
            _refuse_unsupported(pairs)
            now = partial(_group_now, optimizer, k)
            result += [self.add(fragment, now) for fragment in fragments("parameters", pairs)]
        return result

    def shard(self, number: int) -> tuple[Span, ShardRange]:
        """The span and the range of shard `number`."""
        for span in self.spans:
            first = span.ranges[0].number
            if first <= number < first + len(span.ranges):
                return span, span.ranges[number - first]
        raise KeyError(number)


def _group_now(optimizer: Optimizer, number: int) -> dict[str, Any]:
    """The group as it is now: `load_state_dict` replaces the dictionaries of all groups."""
    result: dict[str, Any] = optimizer.param_groups[number]
    return result


def _refuse_unsupported(pairs: Named) -> None:
    for name, parameter in pairs:
        if parameter.is_complex():
            raise UnsupportedError(f"{name} is complex; asynchronous rules take real parameters only")
        if hasattr(parameter, "to_local"):
            raise UnsupportedError(
                f"{name} is sharded (a DTensor), which asynchronous rules do not take; use a rule that exchanges blocks"
            )


class GradientAccumulator:
    """The sum of a span's gradients since the last push, in a flat tensor of `pool`."""

    def __init__(self, span: Span, pool: BufferPool) -> None:
        self._fragment = span.fragment
        device = span.fragment.device
        self._device = None if device.type == "cpu" else torch.zeros(span.numel, dtype=span.pulled.dtype, device=device)
        self._pool, self._flat = pool, pool.take()
        self._views: dict[int, list[Tensor]] = {}
        self.minibatches = 0

    @property
    def _filled(self) -> Tensor:
        """The sum, on the parameters' device."""
        return self._flat if self._device is None else self._device

    def _in(self, flat: Tensor) -> list[Tensor]:
        """Views of the flat tensor in the parameters' shapes and strides."""
        if flat.data_ptr() not in self._views:
            views = []
            for slot, tensor in zip(self._fragment.slots, self._fragment.tensors, strict=True):
                own = local(tensor)
                views.append(flat[slot.offset : slot.end].as_strided(own.shape, own.stride()))
            self._views[flat.data_ptr()] = views
        return self._views[flat.data_ptr()]

    @torch.no_grad()
    def add(self) -> None:
        """Add the present gradients."""
        views = self._in(self._filled)
        pairs = [(view, tensor.grad) for view, tensor in zip(views, self._fragment.tensors, strict=True)]
        self._refuse_sparse()
        have = [(view, grad) for view, grad in pairs if grad is not None]
        if self.minibatches == 0:
            for view, grad in pairs:
                if grad is None:
                    view.zero_()
            if have:
                torch._foreach_copy_([view for view, _ in have], [local(grad) for _, grad in have])
        else:
            for view, grad in have:
                view.add_(local(grad))
        self.minibatches += 1

    def _refuse_sparse(self) -> None:
        for name, tensor in zip(self._fragment.names, self._fragment.tensors, strict=True):
            if tensor.grad is not None and tensor.grad.is_sparse:
                raise UnsupportedError(
                    f"{name} has a sparse gradient, which has no flat form; use sparse=False in its embedding, or a "
                    "rule that exchanges blocks"
                )

    @torch.no_grad()
    def incoming_finite(self) -> bool:
        """Whether the present gradients are finite."""
        self._refuse_sparse()
        gradients = [local(tensor.grad) for tensor in self._fragment.tensors if tensor.grad is not None]
        if not gradients:
            return True
        sums = torch.stack([gradient.sum(dtype=self._fragment.outer_dtype) for gradient in gradients])
        return bool(torch.isfinite(sums).all()) or all(bool(torch.isfinite(g).all()) for g in gradients)

    @torch.no_grad()
    def mean(self) -> Tensor:
        """The mean gradient, shape (numel,), in host memory; the caller returns it to the pool."""
        flat = self._flat
        if self._device is not None:
            flat.copy_(self._device)
        if self.minibatches > 1:
            flat.div_(self.minibatches)
        self._flat = self._pool.take()
        self.minibatches = 0
        return flat

    @torch.no_grad()
    def finite(self) -> bool:
        """Whether the sum is finite."""
        return bool(torch.isfinite(self._filled.sum())) or bool(torch.isfinite(self._filled).all())

    @torch.no_grad()
    def fill_nan(self) -> None:
        """Make the sum nan, so that all owners refuse it."""
        self._filled.fill_(torch.nan)

    def reset(self) -> None:
        """Drop the sum."""
        self.minibatches = 0
