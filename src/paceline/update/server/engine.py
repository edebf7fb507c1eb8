# SPDX-License-Identifier: Apache-2.0
"""Carries out an asynchronous rule: this worker's pushes and pulls, what it owns and serves, and the end together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.leases import Leases
from paceline.rules.rule import Rule
from paceline.update.engine import agreement, exit_handling
from paceline.update.engine.common_start import begin_together
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import refuse_hidden_scaler, skipped, stepping_scaler
from paceline.update.server.client import Client, ClientContext
from paceline.update.server.clients import Clients
from paceline.update.server.delta_client import DeltaClient
from paceline.update.server.engine_state import EngineState
from paceline.update.server.gradient_client import GradientClient
from paceline.update.server.ledger_client import DataAccess
from paceline.update.server.optimizer_support import check_optimizer
from paceline.update.server.owned_shards import OwnedShards
from paceline.update.server.protocol import Service
from paceline.update.server.scaler_watch import ScalerWatch
from paceline.update.server.simulated_service import SimulatedService
from paceline.update.server.socket_service import SocketService
from paceline.update.server.tally import ExchangeTally
from paceline.update.server.unpushed_samples import UnpushedSamples


class Asynchronous:
    """What a run of several workers does at its steps under an asynchronous rule.

    Args:
        context: what the parts of the run share; places of its data are leased.
    """

    keeps_steps = True

    def __init__(self, context: RunContext) -> None:
        rule, owned, scaler = context.rule, context.owned, context.settings.scaler
        self.rule, self._schedule, self._context, self._owned = rule, rule.bounded, context, owned
        self._monitor, self._progress, context.tuner.follow = context.monitor, context.progress, self.follow
        self._pushed = 0
        self.closed = self.local = False
        self._gradient = rule.steps_at_owners
        self._tally = ExchangeTally()
        self._time_passed = False  # whether simulated time has passed for the step under way
        for optimizer, _ in owned:
            check_optimizer(rule, optimizer)
        begin_together(context.transport, rule, context.model, owned, {"seed": context.settings.seed})
        self._shards = OwnedShards(context)
        self._in_hand = UnpushedSamples(context.loaders.take_marks, len(owned))
        self._service = self._connect()
        self._clients = self._make_clients()
        self._state = EngineState(context, self._shards, self._service, self._clients, flushes=self._gradient)
        self._scaler_watch: ScalerWatch | None = None
        if scaler is not None and self._schedule.staleness is not None:
            clocks = lambda: (self._progress.steps, [client.clock for client in self._clients])  # noqa: E731
            self._scaler_watch = ScalerWatch(scaler, clocks, self._skip_step)

    # -- setting up -------------------------------------------------------------------------------

    def _connect(self) -> Service:
        context, shards = self._context, self._shards
        transport, settings, owners = context.transport, context.settings, shards.layout.owners
        if transport.cluster is not None:
            return SimulatedService(transport, transport.cluster, shards.server, owners, shards.ledger)
        bounded = self._schedule.staleness is not None
        unpushed = lambda: [*self._in_hand.waiting, *context.loaders.holding()]  # noqa: E731
        data = DataAccess(shards.ledger, unpushed, lambda: self._clients.flush(), bounded)
        made = SocketService(transport, shards.server, owners, data, settings.timeout_s, settings.tls, self._monitor)
        made.durability.shared_by(len(self._owned))
        return made

    def _make_clients(self) -> Clients:
        numbers, elastic = itertools.count(1), self.rule.center_pull
        workers, clients, shards = self._context.transport.world.size, list[Client](), self._shards
        for k, ((optimizer, _), spans) in enumerate(zip(self._owned, shards.parameters, strict=True)):
            context = ClientContext(self._service, numbers.__next__, partial(self._places, k), self._tally)
            buffers = shards.buffers if k == len(self._owned) - 1 else []
            if self._gradient:
                clients.append(GradientClient(optimizer, context, self._schedule, spans, buffers))
            else:
                clients.append(DeltaClient(optimizer, elastic, workers, context, self._schedule, spans, buffers))
        return Clients([optimizer for optimizer, _ in self._owned], clients, self._context.tuner)

    def _places(self, client: int) -> list[Mark]:
        """The places of the data that go with a client's push: all that this worker has in hand."""
        if client == 0:
            self._pushed = self._progress.steps + int(self._gradient)  # gradients go before their step is counted
        return self._in_hand.push(client)

    # -- steps ------------------------------------------------------------------------------------

    @property
    def hooks_gradients(self) -> bool:
        """Whether something is due before an optimizer's step."""
        return self._gradient

    @property
    def gradients_due(self) -> bool:
        """Whether gradients are pushed before the next step."""
        return self._gradient and not self.closed

    def before_step(self, optimizer: Optimizer) -> None:
        """Push the gradients, and take what has been pulled."""
        if skipped(optimizer):
            return
        self._monitor.begin()
        began = time.perf_counter()
        self._compute()
        agreement.check_unchanged(self._owned)
        waits = self._schedule.staleness is not None and self._context.settings.scaler is None
        if waits and (scaler := stepping_scaler()) is not None:
            refuse_hidden_scaler(self.rule, scaler, False)  # a step that it skips is a clock others wait for
        self._clients.of_gradients(optimizer).before_step()
        self._report(began)

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer made a step, or skipped it."""
        if self._gradient:
            self._clients.of_gradients(optimizer).after_step()

    def on_step(self, warm: bool) -> None:
        """A minibatch was counted."""
        if self._gradient:
            self._time_passed = False
            return
        self._monitor.begin()
        began = time.perf_counter()
        self._service.computed(self._progress.steps - 1)
        agreement.check_unchanged(self._owned)
        self._clients.on_step()
        self._report(began)

    def _skip_step(self, optimizer: Optimizer) -> None:
        """The scaler skipped a step of this optimizer."""
        if self.closed or not any(optimizer is one for one, _ in self._owned):
            return
        self._monitor.begin()
        began = time.perf_counter()
        last = optimizer is self._owned[-1][0]
        if self._gradient:
            self._compute()
            self._clients.of_gradients(optimizer).skip_step()
            self._time_passed = self._time_passed and not last
        elif last:
            self._service.computed(self._progress.steps)
            self._clients.on_step()
        self._report(began)

    def _compute(self) -> None:
        """Let simulated time pass, once a minibatch however many optimizers it has."""
        if not self._time_passed:
            self._time_passed = True
            self._service.computed(self._progress.steps)

    def _report(self, began: float) -> None:
        """Write down what became of pushes."""
        self._tally.report(self._monitor, began, self.exchanged)

    # -- what others need -------------------------------------------------------------------------

    @property
    def steps_committed(self) -> int:
        """Minibatches of this worker whose work is in the global model, or on its way: the first so many."""
        return self._pushed

    @property
    def exchange_position(self) -> None:
        """None: workers go on unevenly."""

    @property
    def leases(self) -> Leases:
        """The way to the ledger of the data."""
        return self._service.leases

    @property
    def exchanged(self) -> int:
        """Pushes that this worker has made."""
        return self._clients.pushes

    @property
    def global_model(self) -> OwnedShards | None:
        """What knows the global model, where the user's may differ from it."""
        return None if self.closed else self._shards

    # -- the end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Push what is left, wait for those who have more data, and take the final model."""
        began = time.perf_counter()
        self._clients.flush()
        self._report(began)
        self._service.secure()
        self.leases.done(self._in_hand.rest())  # such as batches of a validation
        self._service.finish()
        parted = False
        while not parted:
            for client in self._clients:
                client.pull(peeks=False)
                client.write_pulled()
            parted = self._service.part()

    def retune(self) -> None:
        """Does nothing: each worker applies changes by itself."""

    def follow(self, rule: Rule) -> None:
        """Go on with blocks of another length, from the next on."""
        self.rule, self._schedule = rule, rule.bounded
        self._shards.follow(rule)
        self._clients.follow(rule.bounded)

    def close(self) -> None:
        """Let the connection go."""
        self.closed = True
        exit_handling.release(self._owned)
        if self._scaler_watch is not None:
            self._scaler_watch.close()
        self._service.close()

    # -- together ---------------------------------------------------------------------------------

    def merge(self) -> None:
        """Push what is left of a block, and take what all have pushed."""
        self._state.gather(whole=True)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, where all workers have come to one point."""
        return self._state.state()

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave; after the optimizers' own."""
        self._state.load(state)

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        """Read and check what another number of workers saved; what is returned puts it in its place.

        The user's model is to hold the global model by then, and the optimizers the state that goes on.
        """
        return self._state.reshard(old)
