# SPDX-License-Identifier: Apache-2.0
"""The shards of an asynchronous run: the parameters of an optimizer's groups end to end, in host memory, and how they
are cut; which optimizers can step at their owners; and how a checkpoint of N owners is resharded for M.

Each new shard is put together from the old ones that it overlaps: values, the optimizer's state and the outer state
element for element. What a shard has once (its version, the optimizer's count of steps) comes from the overlapped shard
with most updates; at a checkpoint they differ only by pushes that an owner refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core.flat import Fragment, Modules, buffer_fragments, flat_view, fragments
from paceline.core.optimizer_state import Named, Owned
from paceline.data.ledger.ledger import Ledger
from paceline.errors import CheckpointError, UnsupportedError
from paceline.rules.rule import Rule
from paceline.rules.topology.sharded import Cut, Sharded
from paceline.update.engine.context import RunContext
from paceline.update.server.client import Group, ShardRange, Span
from paceline.update.server.shard import (
    LEDGER_SHARD,
    AddDelta,
    BlendBuffer,
    ElasticPull,
    OptimizerSteps,
    ParameterShard,
    ShardServer,
    TakeBuffer,
    UpdateRule,
    WorkerClocks,
    of_optimizer,
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


class ShardLayout:
    """The spans and shards of parameters and buffers, the same on all workers."""

    def __init__(self, topology: Sharded, workers: int) -> None:
        self._topology, self._workers = topology, workers
        self.spans: list[Span] = []
        self.owners: dict[int, int] = {}
        self.shards: dict[int, tuple[Span, ShardRange]] = {}  # the span and the range of each

    def add(self, fragment: Fragment, group: Group | None) -> Span:
        """Cut a fragment into shards."""
        cuts = self._topology.pieces(fragment.numel, self._workers)
        span = Span(len(self.spans), fragment, group, cuts, len(self.owners))
        self.owners |= {one.number: one.cut.owner for one in span.ranges}
        self.shards |= {one.number: (span, one) for one in span.ranges}
        self.spans.append(span)
        return span

    def add_optimizer(self, optimizer: Optimizer, named: Named) -> list[Span]:
        """The parameters of an optimizer, group by group."""
        names = {id(parameter): name for name, parameter in named}
        found = []
        for k, group in enumerate(optimizer.param_groups):
            pairs = [(names[id(p)], p) for p in group["params"] if id(p) in names and p.numel()]
            for name, parameter in pairs:
                if parameter.is_complex():
                    raise UnsupportedError(f"{name} is complex; asynchronous rules take real parameters only")
                if hasattr(parameter, "to_local"):
                    raise UnsupportedError(
                        f"{name} is sharded (a DTensor), which asynchronous rules do not take; use a rule that "
                        "exchanges blocks"
                    )
            found += [self.add(fragment, (optimizer, k)) for fragment in fragments("parameters", pairs)]
        return found


SHARDS = ("exchange", "pieces")


class OldShards:
    """The shards that a checkpoint of N workers holds, of spans with these numbers of elements.

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


def whole_optimizers(old: OldCheckpoint, model: Modules, owned: Owned, topology: Sharded) -> list[dict[str, Any]]:
    """State dictionaries of optimizers that stepped at the owners, for a single worker."""
    found: list[dict[str, Any]] = old.part(0, "optimizers")
    layout = ShardLayout(topology, 1)
    spans = [layout.add_optimizer(optimizer, named) for optimizer, named in owned]
    parts = [*(span.fragment for span in layout.spans), *buffer_fragments(model)]
    shards = OldShards(old, [part.numel for part in parts], topology)
    for (optimizer, _), own, one in zip(owned, spans, found, strict=True):
        every = [p for group in optimizer.param_groups for p in group["params"]]
        place = {id(parameter): number for number, parameter in enumerate(every)}
        one["state"] = {}
        for span in own:
            one["state"] |= _states(span, shards.cut(span.number, 0, span.numel), place)
    return found


def _states(span: Span, shard: dict[str, Any], place: dict[int, int]) -> dict[int, dict[str, Tensor]]:
    """Number of a parameter -> its optimizer state, of a span; without outer state."""
    rows = {key: span.fragment.unflatten(flat) for key, flat in of_optimizer(shard["tensors"]).items()}
    numbers = of_optimizer(shard["about"]["numbers"])
    found: dict[int, dict[str, Tensor]] = {}
    for name, parameter in zip(span.fragment.names, span.fragment.tensors, strict=True):
        state = {key: row[name] for key, row in rows.items()}
        state |= {key: torch.tensor(value, dtype=torch.float32) for key, value in numbers.items()}
        if state:
            found[place[id(parameter)]] = state
    return found


class OwnedShards:
    """Cuts the model into shards, and makes those that this worker owns."""

    def __init__(self, context: RunContext) -> None:
        rule, owned, world = context.rule, context.owned, context.transport.world
        self._rule, self._workers = rule, world.size
        self.ledger = Ledger()  # of the data; used where this worker owns the first shard
        self.layout = ShardLayout(rule.sharded, world.size)  # all spans and shards, the same on all workers
        # the spans of each optimizer
        self.parameters = [self.layout.add_optimizer(optimizer, named) for optimizer, named in owned]
        # the spans of the model's buffers
        self.buffers = [self.layout.add(fragment, None) for fragment in buffer_fragments(context.model)]
        self._optimizer_of = {span.number: owned[k][0] for k, own in enumerate(self.parameters) for span in own}
        for span in self.layout.spans:
            span.read(span.pulled)
            span.incoming.copy_(span.pulled)
        shards = {n: self._shard(n) for n, owner in self.layout.owners.items() if owner == world.rank}
        push_bytes = sum(span.numel * span.pulled.element_size() for span in self.layout.spans)
        # the shards of this worker
        self.server = ShardServer(world.rank, shards, self._shard, rule.center_pull is not None, push_bytes)

    def follow(self, rule: Rule) -> None:
        """Make further shards by the numbers of this rule."""
        self._rule = rule

    def _shard(self, number: int) -> ParameterShard:
        """A shard with the values that this worker pulled last."""
        span, one = self.layout.shards[number]
        anchor = span.pulled[one.cut.begin : one.cut.end].clone()
        clocks = WorkerClocks(self._rule.bounded, range(self._workers))
        optimizer = self._stepping(span)
        keeps_origins = optimizer is not None and self._rule.arrival.needs_origin
        shard = ParameterShard(number, anchor, lambda a: self._update_rule(span, a, clocks), clocks, keeps_origins)
        shard.version = one.version
        shard.ledger = self.ledger if number == LEDGER_SHARD else None
        if optimizer is not None and optimizer.state:
            shard.update_rule.load(*optimizer_state(optimizer, span.fragment, one.cut.begin, one.cut.end))
        return shard

    def _stepping(self, span: Span) -> Optimizer | None:
        """The optimizer that steps at the owners of this span's shards."""
        return self._optimizer_of.get(span.number) if self._rule.steps_at_owners else None

    def _update_rule(self, span: Span, anchor: Tensor, clocks: WorkerClocks) -> UpdateRule:
        optimizer = self._optimizer_of.get(span.number)
        rule = self._rule
        if optimizer is None:
            return TakeBuffer(clocks) if span.fragment.from_rank_0 else BlendBuffer()
        if rule.steps_at_owners:
            return OptimizerSteps(rule.arrival, type(optimizer), anchor, span.settings())
        if rule.center_pull is not None:
            return ElasticPull(rule.center_pull, self._workers)
        return AddDelta(rule.arrival)

    # -- checkpoints ------------------------------------------------------------------------------

    def resharded(self, old: OldCheckpoint, clocks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Number -> state, of this worker's shards, from a checkpoint of another number of workers.

        All workers resume with these clocks, one for each optimizer; the buffers go with the last one.
        """
        shards = OldShards(old, [span.numel for span in self.layout.spans], self._rule.sharded)
        clock_of = {span.number: clock for own, clock in zip(self.parameters, clocks, strict=True) for span in own}
        return {
            one.number: shards.cut(
                span.number,
                one.cut.begin,
                one.cut.end,
                [(rank, clock_of.get(span.number, clocks[-1])) for rank in range(self._workers)],
            )
            for span in self.layout.spans
            for one in span.ranges
            if one.number in self.server.shards
        }

    def from_one_worker(self) -> dict[int, dict[str, Any]]:
        """The same, made from the model and the optimizers of a single worker."""
        found = {number: self._shard(number).state() for number in self.server.shards}
        for state in found.values():
            state["about"]["version"] = 0
        return found

    # -- the global model ---------------------------------------------------------------------------

    @property
    def global_parts(self) -> list[Span]:
        """The spans, which hold the global model as it was pulled last."""
        return self.layout.spans
