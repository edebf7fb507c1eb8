# SPDX-License-Identifier: Apache-2.0
"""The shards of an asynchronous run: the parameters of an optimizer's groups end to end, in host memory, and how they
are cut; which optimizers can step at their owners; and how a checkpoint of N owners is resharded for M.

Each new shard is put together from the old ones that it overlaps: values, the optimizer's state and the outer state
element for element. What a shard has once (its version, the optimizer's count of steps) comes from the overlapped shard
with most updates; at a checkpoint they differ only by pushes that an owner refused.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core.flat import Fragment, Modules, buffer_fragments, flat_view, fragments, local
from paceline.core.optimizer_state import Named, Owned
from paceline.data.ledger.ledger import Ledger
from paceline.errors import CheckpointError, UnsupportedError
from paceline.rules.rule import Rule
from paceline.rules.topology.sharded import Cut, Sharded
from paceline.update.engine.context import RunContext
from paceline.update.server.owner import ShardServer
from paceline.update.server.protocol import ShardRequest
from paceline.update.server.shard import (
    LEDGER_SHARD,
    LOCAL_SETTINGS,
    AddDelta,
    BlendBuffer,
    ElasticPull,
    GroupSettings,
    OptimizerSteps,
    ParameterShard,
    TakeBuffer,
    UpdateRule,
    WorkerClocks,
)

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, RMSprop, NAdam, RAdam, Rprop, ASGD,
)  # fmt: skip
"""Element-wise optimizers: an owner can step a shard without the rest of a tensor."""
COUNTERS = ("step", "mu_product", "eta", "mu")
"""State that they keep once for a parameter, also where the parameter has no dimensions."""


def check_optimizer(rule: Rule, optimizer: Optimizer) -> None:
    """Refuse optimizers that cannot step at the owners of shards."""
    if not rule.steps_at_owners:
        return
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UnsupportedError(
            f"under {rule.text()} the owners of slices make the optimizer's step, each on its own slice, and {name} is "
            f"not known to treat every number alike; use one of torch's {known}, or asgd(period=...), "
            "where the optimizer steps on the worker"
        )
    outer: Any = rule.outer
    outer.resolve(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(f"{name}(differentiable=True) cannot step on another worker")


@torch.no_grad()
def optimizer_state(
    optimizer: Optimizer, fragment: Fragment, begin: int, end: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The optimizer's present state for elements begin .. end (excl.) of a fragment."""
    rows: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for slot, tensor in zip(fragment.slots, fragment.tensors, strict=True):
        for key, value in optimizer.state.get(tensor, {}).items():
            if isinstance(value, Tensor) and value.shape == tensor.shape and key not in COUNTERS:
                row = rows.setdefault(key, torch.zeros(fragment.numel, dtype=fragment.outer_dtype))
                row[slot.offset : slot.end].copy_(flat_view(key, value))
            elif isinstance(value, Tensor) and value.numel() == 1:
                numbers[f"optimizer.{key}"] = max(float(value), numbers.get(f"optimizer.{key}", 0.0))
    return {f"optimizer.{key}": row[begin:end].clone() for key, row in rows.items()}, numbers


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
        part, found = self.fragment, []
        for slot, tensor in zip(part.slots, part.tensors, strict=True):
            now = flat_view(slot.name, tensor)
            if not torch.equal(now, self.pulled[slot.offset : slot.end].to(now.device, now.dtype)):
                found.append(slot.name)
        return found

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
        found = []
        for k, group in enumerate(optimizer.param_groups):
            pairs = [(names[id(p)], p) for p in group["params"] if id(p) in names and p.numel()]
            _refuse_unsupported(pairs)
            now = partial(_group_now, optimizer, k)
            found += [self.add(fragment, now) for fragment in fragments("parameters", pairs)]
        return found

    def shard(self, number: int) -> tuple[Span, ShardRange]:
        """The span and the range of shard `number`."""
        for span in self.spans:
            first = span.ranges[0].number
            if first <= number < first + len(span.ranges):
                return span, span.ranges[number - first]
        raise KeyError(number)


def _group_now(optimizer: Optimizer, number: int) -> dict[str, Any]:
    """The group as it is now: `load_state_dict` replaces the dictionaries of all groups."""
    found: dict[str, Any] = optimizer.param_groups[number]
    return found


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


SHARDS = ("exchange", "pieces")


class OldShards:
    """The shards that a checkpoint of N workers holds.

    Args:
        old: the checkpoint.
        numels: elements of each span, in order.
        topology: how spans were cut.

    Raises:
        CheckpointError: its shards are not those of such spans.
    """

    def __init__(self, old: OldCheckpoint, numels: Sequence[int], topology: Sharded) -> None:
        self._old = old
        self._spans: list[list[tuple[int, Cut]]] = []
        first = 0
        for numel in numels:
            cuts = topology.pieces(numel, old.size)
            self._spans.append(list(enumerate(cuts, first)))
            first += len(cuts)
        self._rank_of = {int(number): rank for rank in range(old.size) for number in old.keys(rank, *SHARDS)}
        if sorted(self._rank_of) != list(range(first)):
            raise CheckpointError(
                f"the checkpoint does not fit the model: it holds {len(self._rank_of)} shards, and {old.size} workers "
                f"have {first} of this model"
            )

    def _part(self, number: int, *path: str) -> Any:
        return self._old.part(self._rank_of[number], *SHARDS, str(number), *path)

    def cut(self, span: int, begin: int, end: int, clocks: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
        """Elements begin .. end (excl.) of a span, as the state of a shard with these (rank, clock) pairs."""
        over = [(n, cut) for n, cut in self._spans[span] if cut.begin < end and begin < cut.end]
        abouts = {number: self._part(number, "about") for number, _ in over}
        newest = max(abouts.values(), key=lambda about: int(about["version"]))
        names = list(dict.fromkeys(name for about in abouts.values() for name in about["tensors"]))
        anchor = torch.cat([self._slice(n, cut, begin, end, "anchor") for n, cut in over])
        tensors = {
            name: torch.cat(
                [
                    self._slice(n, cut, begin, end, "tensors", name)
                    if name in abouts[n]["tensors"]
                    else torch.zeros(min(cut.end, end) - max(cut.begin, begin), dtype=anchor.dtype)
                    for n, cut in over
                ]
            )
            for name in names
        }
        about = {"version": newest["version"], "numbers": newest["numbers"], "tensors": names, "clocks": clocks}
        return {"about": about, "anchor": anchor, "tensors": tensors, "origins": {}, "first": anchor}

    def _slice(self, number: int, cut: Cut, begin: int, end: int, *path: str) -> Tensor:
        whole: Tensor = self._part(number, *path)
        if whole.numel() != cut.numel:
            raise CheckpointError(
                f"the checkpoint does not fit the model: shard {number} has {whole.numel()} elements there and "
                f"{cut.numel} here"
            )
        return whole[max(begin, cut.begin) - cut.begin : min(end, cut.end) - cut.begin]


def resharded(
    old: OldShards, spans: Sequence[Span], own: Container[int], clocks: Sequence[tuple[int, int]]
) -> dict[int, dict[str, Any]]:
    """Number -> state, of the shards of `spans` that are in `own`; with the (rank, clock) pairs of all workers."""
    return {
        one.number: old.cut(span.number, one.cut.begin, one.cut.end, clocks)
        for span in spans
        for one in span.ranges
        if one.number in own
    }


def from_one_worker(span: Span, optimizer: Optimizer | None, own: Container[int]) -> dict[int, dict[str, Any]]:
    """Number -> state, of a span's shards that are in `own`, after a run of one worker.

    Args:
        span: with the model's values in `pulled`.
        optimizer: whose state the owners continue, if any.
        own: numbers of shards.
    """
    tensors, numbers = optimizer_state(optimizer, span.fragment, 0, span.numel) if optimizer is not None else ({}, {})
    about = {"version": 0, "numbers": numbers, "clocks": []}
    found = {}
    for one in span.ranges:
        if one.number in own:
            low, high = one.cut.begin, one.cut.end
            values = span.pulled[low:high]
            kept = {name: tensor[low:high] for name, tensor in tensors.items()}
            found[one.number] = {"about": about, "anchor": values, "tensors": kept, "origins": {}, "first": values}
    return found


def old_clocks(old: OldCheckpoint, count: int) -> list[int]:
    """The clocks with which all workers resume, one for each client: those of rank 0."""
    return [int(old.part(0, "exchange", "streams", k, "clock") or 0) for k in range(count)]


def whole_optimizers(old: OldCheckpoint, model: Modules, owned: Owned, topology: Sharded) -> list[dict[str, Any]]:
    """State dictionaries of optimizers that stepped at the owners, for a single worker.

    Args:
        old: the checkpoint.
        model: the user's modules.
        owned: (optimizer, its named parameters) pairs.
        topology: how spans were cut.
    """
    found: list[dict[str, Any]] = old.part(0, "optimizers")
    layout = ShardLayout(topology, 1)
    spans = [layout.add_optimizer(optimizer, named) for optimizer, named in owned]
    numels = [span.numel for span in layout.spans]
    numels += [part.numel for part in buffer_fragments(model)]
    shards = OldShards(old, numels, topology)
    for (optimizer, _), own, one in zip(owned, spans, found, strict=True):
        every = [p for group in optimizer.param_groups for p in group["params"]]
        place = {id(parameter): number for number, parameter in enumerate(every)}
        one["state"] = {}
        for span in own:
            for number, state in _states(span, shards.cut(span.number, 0, span.numel), place):
                one["state"][number] = state
    return found


def _states(span: Span, shard: dict[str, Any], place: dict[int, int]) -> list[tuple[int, dict[str, Tensor]]]:
    """(number of a parameter, its optimizer state) pairs of a span; without outer state."""
    prefix = "optimizer."
    rows = {
        key.removeprefix(prefix): span.fragment.unflatten(flat)
        for key, flat in shard["tensors"].items()
        if key.startswith(prefix)
    }
    numbers = {k.removeprefix(prefix): v for k, v in shard["about"]["numbers"].items() if k.startswith(prefix)}
    found = []
    for name, parameter in zip(span.fragment.names, span.fragment.tensors, strict=True):
        state = {key: row[name] for key, row in rows.items()}
        state |= {key: torch.tensor(value, dtype=torch.float32) for key, value in numbers.items()}
        if state:
            found.append((place[id(parameter)], state))
    return found


class OwnedShards:
    """Cuts the model into shards, and makes those that this worker owns.

    Args:
        context: of the run, whose rule is asynchronous.

    Attributes:
        ledger: of the data; used where this worker owns the first shard.
        layout: all spans and shards, the same on all workers.
        parameters: the spans of each optimizer.
        buffers: the spans of the model's buffers.
        server: the shards of this worker.
    """

    def __init__(self, context: RunContext) -> None:
        rule, owned, world = context.rule, context.owned, context.transport.world
        self._rule, self._workers, self._schedule = rule, world.size, rule.bounded
        self._gradient = rule.steps_at_owners
        self.ledger = Ledger()
        self.layout = ShardLayout(rule.sharded, world.size)
        self.parameters = [self.layout.add_optimizer(optimizer, named) for optimizer, named in owned]
        self.buffers = [self.layout.add(fragment, None) for fragment in buffer_fragments(context.model)]
        self._optimizer_of = {span.number: owned[k][0] for k, own in enumerate(self.parameters) for span in own}
        for span in self.layout.spans:
            span.read(span.pulled)
            span.incoming.copy_(span.pulled)
        shards = {n: self._shard(n) for n, owner in self.layout.owners.items() if owner == world.rank}
        push_bytes = sum(span.numel * span.pulled.element_size() for span in self.layout.spans)
        self.server = ShardServer(world.rank, shards, self._shard, rule.center_pull is not None, push_bytes)

    def follow(self, rule: Rule) -> None:
        """Make further shards by the numbers of this rule."""
        self._rule, self._schedule = rule, rule.bounded

    def _shard(self, number: int) -> ParameterShard:
        """A shard with the values that this worker pulled last."""
        span, one = self.layout.shard(number)
        anchor = span.pulled[one.cut.begin : one.cut.end].clone()
        clocks = WorkerClocks(self._schedule, range(self._workers))
        optimizer = self._stepping(span)
        keeps_origins = optimizer is not None and self._rule.arrival.needs_origin
        shard = ParameterShard(number, anchor, lambda a: self._update_rule(span, a, clocks), clocks, keeps_origins)
        shard.version = one.version
        shard.ledger = self.ledger if number == LEDGER_SHARD else None
        if optimizer is not None and optimizer.state:
            tensors, numbers = optimizer_state(optimizer, span.fragment, one.cut.begin, one.cut.end)
            shard.begin_with(tensors, numbers)
        return shard

    def _stepping(self, span: Span) -> Optimizer | None:
        """The optimizer that steps at the owners of this span's shards."""
        return self._optimizer_of.get(span.number) if self._gradient else None

    def _update_rule(self, span: Span, anchor: Tensor, clocks: WorkerClocks) -> UpdateRule:
        optimizer = self._optimizer_of.get(span.number)
        rule = self._rule
        if optimizer is None:
            return TakeBuffer(clocks) if span.fragment.from_rank_0 else BlendBuffer()
        if self._gradient:
            return OptimizerSteps(rule.arrival, type(optimizer), anchor, span.settings())
        if rule.center_pull is not None:
            return ElasticPull(rule.center_pull, self._workers)
        return AddDelta(rule.arrival)

    def from_one_worker(self) -> dict[int, dict[str, Any]]:
        """States of this worker's shards, made from the model and the optimizers of a single worker."""
        found: dict[int, dict[str, Any]] = {}
        for span in self.layout.spans:
            found |= from_one_worker(span, self._stepping(span), self.server.shards)
        return found

    # -- the global model ---------------------------------------------------------------------------

    @property
    def global_parts(self) -> list[Span]:
        """The spans, which hold the global model as it was pulled last."""
        return self.layout.spans

    def global_tensors(self) -> dict[str, Tensor]:
        """Name -> copy of the global model's parameter or buffer, in the model's dtype and shape."""
        found: dict[str, Tensor] = {}
        for span in self.layout.spans:
            found |= span.fragment.unflatten(span.exported)
        return found
