# SPDX-License-Identifier: Apache-2.0
"""The spans and shards of an asynchronous run, and the server of those that this worker owns."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.core.flat import buffer_fragments
from paceline.data.ledger.ledger import Ledger
from paceline.rules.rule import Rule
from paceline.update.engine.context import RunContext
from paceline.update.server.optimizer_support import optimizer_state
from paceline.update.server.owner import ShardServer
from paceline.update.server.reshard import from_one_worker
from paceline.update.server.shard import LEDGER_SHARD, ParameterShard
from paceline.update.server.shard_updates import (
    AddDelta,
    BlendBuffer,
    ElasticPull,
    OptimizerSteps,
    TakeBuffer,
    UpdateRule,
)
from paceline.update.server.sharding import ShardLayout, Span
from paceline.update.server.staleness import WorkerClocks


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
        result: dict[int, dict[str, Any]] = {}
        for span in self.layout.spans:
            result |= from_one_worker(span, self._stepping(span), self.server.shards)
        return result

    # -- the global model ---------------------------------------------------------------------------

    @property
    def global_parts(self) -> list[Span]:
        """The spans, which hold the global model as it was pulled last."""
        return self.layout.spans

    def global_tensors(self) -> dict[str, Tensor]:
        """Name -> copy of the global model's parameter or buffer, in the model's dtype and shape."""
        result: dict[str, Tensor] = {}
        for span in self.layout.spans:
            result |= span.fragment.unflatten(span.exported)
        return result
