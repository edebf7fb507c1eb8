# SPDX-License-Identifier: Apache-2.0
"""Carries out an asynchronous rule: this worker's pushes and pulls, what it owns and serves, and the end together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core.flat import averaged_buffers, find_buffers, fragments
from paceline.data.ledger.assignment import Leases
from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.ledger import Ledger
from paceline.rules.outer import Elastic
from paceline.rules.rule import Rule
from paceline.rules.topology.sharded import Sharded
from paceline.update.engine import agreement, exit_handling
from paceline.update.engine.common_start import begin_together
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import refuse_hidden_scaler, skipped, stepping_scaler
from paceline.update.exchange.header import Timing
from paceline.update.server.client import Client, ExchangeTally
from paceline.update.server.delta_client import DeltaClient
from paceline.update.server.gradient_client import GradientClient
from paceline.update.server.ledger_client import DataAccess
from paceline.update.server.optimizer_support import check_optimizer, optimizer_state
from paceline.update.server.owner import ShardServer
from paceline.update.server.places_in_hand import PlacesInHand
from paceline.update.server.protocol import Service
from paceline.update.server.reshard import OldShards, from_one_worker, old_clocks, resharded
from paceline.update.server.shard import LEDGER_SHARD, Shard
from paceline.update.server.shard_updates import AddDelta, BlendBuffer, ElasticPull, OptimizerSteps, UpdateRule
from paceline.update.server.sharding import ShardLayout, Span
from paceline.update.server.simulated_service import SimulatedService
from paceline.update.server.socket_service import SocketService
from paceline.update.server.staleness import WorkerClocks


class Asynchronous:
    """What a run of several workers does at its steps under an asynchronous rule.

    Args:
        context: what the parts of the run share; places of its data are leased.
    """

    def __init__(self, context: RunContext) -> None:
        rule, settings, owned = context.rule, context.settings, context.owned
        self.rule, self._transport, self._model, self._owned = rule, context.transport, context.model, owned
        self._settings, self._flow, self._watch = settings, context.progress, context.monitor
        self._feed, self._tuner, context.tuner.follow = context.loaders, context.tuner, self.follow
        self._ledger = Ledger()
        self._pushed = 0
        self._schedule = rule.bounded
        self.closed = self.local = False
        self._gradient = rule.steps_at_owners
        self._tally = ExchangeTally()
        self._ahead = False  # whether simulated time has passed for the step under way
        for optimizer, _ in owned:
            check_optimizer(rule, optimizer)
        self._join(rule.sharded)
        self._scaler: Any = None
        if settings.scaler is not None and self._schedule.staleness is not None:
            self._watch_scaler(settings.scaler)

    # -- setting up -------------------------------------------------------------------------------

    def _join(self, topology: Sharded) -> None:
        transport, world = self._transport, self._transport.world
        begin_together(transport, self.rule, self._model, self._owned, {"seed": self._settings.seed})
        self._layout = ShardLayout(topology, world.size)
        spans = [self._layout.add_optimizer(optimizer, named) for optimizer, named in self._owned]
        found = fragments("buffers", averaged_buffers(self._model), find_buffers(self._model))
        buffers = [self._layout.add(fragment, None) for fragment in found]
        self._optimizer_of = {span.number: self._owned[k][0] for k, own in enumerate(spans) for span in own}
        for span in self._layout.spans:
            span.read(span.pulled)
            span.incoming.copy_(span.pulled)
        shards = {n: self._shard(n) for n, owner in self._layout.owners.items() if owner == world.rank}
        push_bytes = sum(span.numel * span.pulled.element_size() for span in self._layout.spans)
        self._server = ShardServer(world.rank, shards, self._shard, isinstance(self.rule.outer, Elastic), push_bytes)
        self._in_hand = PlacesInHand(self._feed.take_marks, len(self._owned))
        self._service = self._connect()
        numbers = itertools.count(1)
        self._clients: list[Client] = []
        for k, (optimizer, _) in enumerate(self._owned):
            with_buffers = buffers if k == len(self._owned) - 1 else []
            number = lambda: next(numbers)  # noqa: E731
            marks = partial(self._marks, k)
            shared = (self._service, self._schedule, spans[k], with_buffers, number, marks, self._tally)
            self._clients.append(self._client(optimizer, shared))

    def _marks(self, client: int) -> list[Mark]:
        """The places of the data that go with a client's push: all that this worker has in hand."""
        if client == 0:
            self._pushed = self._flow.steps + int(self._gradient)  # gradients go before their step is counted
        return self._in_hand.push(client)

    def _holding(self) -> list[Mark]:
        """The places whose work is not on its way to the global model yet."""
        return [*self._in_hand.waiting, *self._feed.holding()]

    def _client(self, optimizer: Optimizer, shared: tuple[Any, ...]) -> Client:
        if self._gradient:
            return GradientClient(optimizer, *shared)
        elastic = self.rule.outer if isinstance(self.rule.outer, Elastic) else None
        return DeltaClient(optimizer, elastic, self._transport.world.size, *shared)

    def _shard(self, number: int) -> Shard:
        """A shard with the values that this worker pulled last."""
        span, one = self._layout.shard(number)
        anchor = span.pulled[one.cut.begin : one.cut.end].clone()
        clocks = WorkerClocks(self._schedule, range(self._transport.world.size))
        keeps = self._gradient and bool(getattr(self.rule.outer, "needs_origin", False))
        shard = Shard(
            number, anchor, lambda a: self._update_rule(span, a), clocks, keeps and span.number in self._optimizer_of
        )
        shard.version = one.version
        shard.ledger = self._ledger if number == LEDGER_SHARD else None
        optimizer = self._optimizer_of.get(span.number)
        if self._gradient and optimizer is not None and optimizer.state:
            tensors, numbers = optimizer_state(optimizer, span.fragment, one.cut.begin, one.cut.end)
            shard.begin_with(tensors, numbers)
        return shard

    def _update_rule(self, span: Span, anchor: Tensor) -> UpdateRule:
        optimizer = self._optimizer_of.get(span.number)
        outer: Any = self.rule.outer
        if optimizer is None:
            return BlendBuffer()
        if self._gradient:
            return OptimizerSteps(outer, type(optimizer), anchor, span.settings())
        if isinstance(outer, Elastic):
            return ElasticPull(outer, self._transport.world.size)
        return AddDelta(outer)

    def _connect(self) -> Service:
        transport, owners = self._transport, self._layout.owners
        if transport.cluster is not None:
            return SimulatedService(transport, transport.cluster, self._server, owners, self._ledger)
        data = DataAccess(self._ledger, self._holding, self._flush, self._schedule.staleness is not None)
        made = SocketService(
            transport, self._server, owners, data, self._settings.timeout_s, self._settings.tls, self._watch
        )
        made.durability.shared_by(len(self._owned))
        return made

    # -- steps ------------------------------------------------------------------------------------

    @property
    def hooks_gradients(self) -> bool:
        """Whether something is due before an optimizer's step."""
        return self._gradient

    @property
    def gradients_due(self) -> bool:
        """Whether gradients are pushed before the next step."""
        return self._gradient and not self.closed

    @property
    def keeps_steps(self) -> bool:
        """All write the steps that are due together."""
        return True

    def before_step(self, optimizer: Optimizer) -> None:
        """Push the gradients, and take what has been pulled."""
        if skipped(optimizer):
            return
        self._watch.begin()
        began = time.perf_counter()
        self._compute()
        client = self._client_of(optimizer)
        assert isinstance(client, GradientClient)
        agreement.check_unchanged(self._owned)
        waits = self._schedule.staleness is not None and self._settings.scaler is None
        if waits and (scaler := stepping_scaler()) is not None:
            refuse_hidden_scaler(self.rule, scaler, False)  # a step that it skips is a clock others wait for
        client.before_step()
        self._note(began)

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer made a step, or skipped it."""
        client = self._client_of(optimizer)
        if isinstance(client, GradientClient):
            client.after_step()

    def on_step(self, warm: bool) -> None:
        """A minibatch was counted."""
        if self._gradient:
            self._ahead = False
            return
        self._watch.begin()
        began = time.perf_counter()
        self._service.computed(self._flow.steps - 1)
        agreement.check_unchanged(self._owned)
        for client in self._clients:
            assert isinstance(client, DeltaClient)
            client.stepped()
        self._note(began)

    def _watch_scaler(self, scaler: Any) -> None:
        """A step that the scaler skips moves nothing, but others wait for this worker's clock, which has to go on."""
        self._scaler, step = scaler, scaler.step

        def stepped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self._flow.steps, [client.clock for client in self._clients]
            result = step(optimizer, *args, **kwargs)
            made = before != (self._flow.steps, [client.clock for client in self._clients])
            if not made and not self.closed and any(optimizer is one for one, _ in self._owned):
                self._skip_step(optimizer)
            return result

        scaler.step = stepped

    def _skip_step(self, optimizer: Optimizer) -> None:
        """A minibatch without a step of this optimizer."""
        self._watch.begin()
        began = time.perf_counter()
        last = optimizer is self._owned[-1][0]
        if self._gradient:
            self._compute()
            client = self._client_of(optimizer)
            assert isinstance(client, GradientClient)
            client.skip_step()
            self._ahead = self._ahead and not last
        elif last:
            self._service.computed(self._flow.steps)
            for blocks in self._clients:
                assert isinstance(blocks, DeltaClient)
                blocks.stepped()
        self._note(began)

    def _compute(self) -> None:
        """Let simulated time pass, once a minibatch however many optimizers it has."""
        if not self._ahead:
            self._ahead = True
            self._service.computed(self._flow.steps)

    def _note(self, began: float) -> None:
        """Write down what has become of pushes."""
        tally = self._tally
        for delay in tally.delays:
            self._watch.pushed(delay)
        if tally.refused:
            self._watch.refused(tally.refused)
        if tally.delays or tally.refused:
            timing = Timing(wait_s=tally.wait_s, exchange_s=max(0.0, time.perf_counter() - began - tally.wait_s))
            self._watch.end(timing, None, block=self.exchanged, warmup=False)
        else:
            self._watch.sent()
        tally.delays, tally.refused, tally.wait_s = [], 0, 0.0

    def _client_of(self, optimizer: Optimizer) -> Client:
        return next(s for s, (one, _) in zip(self._clients, self._owned, strict=True) if one is optimizer)

    # -- what others need -------------------------------------------------------------------------

    @property
    def steps_committed(self) -> int:
        """Minibatches of this worker whose work is in the global model, or on its way: the first so many."""
        return self._pushed

    @property
    def moment(self) -> None:
        """None: workers go on unevenly."""

    @property
    def leases(self) -> Leases:
        """The way to the ledger of the data."""
        return self._service.leases

    @property
    def exchanged(self) -> int:
        """Pushes that this worker has made."""
        return max(client.clock for client in self._clients)

    @property
    def global_model(self) -> Asynchronous | None:
        """What knows the global model, where the user's may differ from it."""
        return None if self.closed else self

    @property
    def global_parts(self) -> list[Span]:
        """Whose anchors are the global model, as it was pulled last."""
        return self._layout.spans

    def global_tensors(self) -> dict[str, Tensor]:
        """Name -> the global model's parameter or buffer, in the model's own dtype and shape; copies."""
        found: dict[str, Tensor] = {}
        for span in self._layout.spans:
            found |= span.fragment.unflatten(span.anchor)
        return found

    # -- the end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Push what is left, wait for those who have more data, and take the final model."""
        began = time.perf_counter()
        self._flush()
        self._note(began)
        self._service.secure()
        self.leases.done(self._in_hand.rest())  # such as batches of a validation
        self._service.finish()
        parted = False
        while not parted:
            for client in self._clients:
                client.refresh(peeks=False)
                client.settle()
            parted = self._service.part()

    def _flush(self) -> None:
        """Push what is left, with the rates with which steps are made."""
        with self._tuner.knobs.rates.applied():
            for client in self._clients:
                client.flush()

    def follow(self, rule: Rule) -> None:
        """Go on with blocks of another length, from the next on."""
        self.rule, self._schedule = rule, rule.bounded
        for client in self._clients:
            client.follow(rule.bounded)

    def close(self) -> None:
        """Let the connection go."""
        self.closed = True
        exit_handling.release(self._owned)
        if self._scaler is not None:
            self._scaler.__dict__.pop("step", None)
        self._service.close()

    # -- together ---------------------------------------------------------------------------------

    def merge(self) -> None:
        """Push what is left of a block, and take what all have pushed."""
        self._gather(whole=True)

    def _gather(self, whole: bool) -> None:
        """What is under way is waited for, and all workers come to one point.

        Args:
            whole: whether blocks that are under way are pushed as they are.
        """
        self.leases.waits(True)  # others may have to go on into the next epoch before they come here
        if self._gradient or whole:
            self._flush()
        for client in self._clients:
            client.wait()
        self._service.secure(rests=False)
        self._service.settle()
        for client in self._clients:
            client.refresh(peeks=True)
        self._service.settle()  # the clock is the same for all who save it
        for client in self._clients:
            client.restart_timing()
        self.leases.waits(False)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, where all workers have come to one point."""
        self._gather(whole=False)
        return {
            "service": self._service.state(),
            "pieces": {str(number): shard.state() for number, shard in self._server.shards.items()},
            "streams": [client.state() for client in self._clients],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave; after the optimizers' own."""
        for number, saved in state["pieces"].items():
            self._server.shards[int(number)].load(saved)
        for client, saved in zip(self._clients, state["streams"], strict=True):
            client.load(saved)
        self._service.load(state["service"])
        self._service.begin_anew()
        self._service.settle()
        for client in self._clients:
            client.restart_timing()

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        """Read and check what another number of workers saved; what is returned puts it in its place.

        The user's model is to hold the global model by then, and the optimizers the state that goes on.
        """
        clocks = old_clocks(old, len(self._clients))
        found: dict[int, dict[str, Any]] | None = None
        if old.size > 1:
            found = {}
            shards = OldShards(old, [span.numel for span in self._layout.spans], self.rule.sharded)
            for client, clock in zip(self._clients, clocks, strict=True):
                alike = [(rank, clock) for rank in range(self._transport.world.size)]
                found |= resharded(shards, client.every, self._server.shards, alike)
        return lambda: self._begin(found, clocks)

    def _begin(self, found: dict[int, dict[str, Any]] | None, clocks: list[int]) -> None:
        """Own what was found, or the model and the optimizers as they are; then all begin at the global model."""
        for span in self._layout.spans:
            span.read(span.pulled)
        for number, state in (self._of_one() if found is None else found).items():
            self._server.shards[number].load(state)
        for client, clock in zip(self._clients, clocks, strict=True):
            client.clock = clock
        self._service.begin_anew()
        self._service.settle()  # nobody asks before all have what they own
        for client in self._clients:
            client.begin()
        self._service.settle()
        for client in self._clients:
            client.restart_timing()

    def _of_one(self) -> dict[int, dict[str, Any]]:
        """This worker's shards of what a single worker had."""
        found: dict[int, dict[str, Any]] = {}
        for span in self._layout.spans:
            optimizer = self._optimizer_of.get(span.number) if self._gradient else None
            found |= from_one_worker(span, optimizer, self._server.shards)
        return found
