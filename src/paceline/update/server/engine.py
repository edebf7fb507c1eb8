# SPDX-License-Identifier: Apache-2.0
"""The engine of asynchronous rules: a worker's pushes and pulls, the shards that it serves, and the end of the run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core.flat import Fragment
from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.leases import Leases
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.update.engine import exit_handling
from paceline.update.engine.agreement import begin_together
from paceline.update.engine.blocks.outer_state import names_apart, say_apart
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import ScalerHook, refuse_hidden_scaler, stepping_scaler
from paceline.update.monitor import skipped
from paceline.update.server.client import Client, ClientContext, Clients, DeltaClient, ExchangeTally, GradientClient
from paceline.update.server.ledger_client import DataAccess
from paceline.update.server.protocol import Service
from paceline.update.server.sharding import OldShards, OwnedShards, check_optimizer, host, old_clocks, resharded
from paceline.update.server.simulated_service import SimulatedService
from paceline.update.server.socket_service import SocketService


class UnpushedSamples:
    """The sample ranges that each client has not pushed.

    Args:
        take: gives the ranges that the loaders have handed out since the last call.
        clients: how many push what they make of a batch; the pushes of the first one count the samples.
    """

    def __init__(self, take: Callable[[], list[Mark]], clients: int) -> None:
        self._take = take
        self._pending: list[list[Mark]] = [[] for _ in range(max(1, clients))]

    def push(self, client: int) -> list[Mark]:
        """The sample ranges of a client's push."""
        taken = self._take()
        for pending in self._pending:
            pending += taken
        marks, self._pending[client] = self._pending[client], []
        return marks

    def rest(self) -> list[Mark]:
        """The ranges that will not be pushed."""
        marks = self.push(0)
        self._pending = [[] for _ in self._pending]
        return marks

    @property
    def waiting(self) -> list[Mark]:
        """Ranges that another client has pushed and the first has not."""
        return list(self._pending[0])


class EngineState:
    """Saves and loads the shards of this worker, and the values that it has pulled.

    Args:
        context: of the run.
        shards: that this worker owns.
        service: the connections to the owners.
        clients: one for each optimizer.
        flushes: whether a checkpoint first pushes gathered work.
    """

    def __init__(
        self, context: RunContext, shards: OwnedShards, service: Service, clients: Clients, flushes: bool
    ) -> None:
        self._context, self._shards, self._server = context, shards, shards.server
        self._service, self._clients, self._flushes = service, clients, flushes

    def gather(self, whole: bool) -> None:
        """Finish all exchanges, and wait for all workers.

        Args:
            whole: push the steps of an unfinished block, too, and go on without lost workers: two owners have what
                the living ones pushed, so that these take the same values whoever is lost.
        """
        leases = self._service.leases
        leases.waits(True)  # other workers may have to begin the next epoch before they come here
        if self._flushes or whole:
            self._clients.flush()
        self._clients.wait()
        self._service.secure(idle=False)
        self._service.barrier(of_all=not whole)
        self._clients.pull(peeks=True)
        self._service.barrier(of_all=not whole)  # so that all save the same clock
        self._clients.restart_timing()
        leases.waits(False)

    def state(self) -> dict[str, Any]:
        """This worker's part of a checkpoint; a barrier of all workers."""
        self.gather(whole=False)
        return {
            "service": self._service.state(),
            "pieces": {str(number): shard.state() for number, shard in self._server.shards.items()},
            "streams": [client.state() for client in self._clients],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave, after the optimizers."""
        for number, saved in state["pieces"].items():
            self._server.shards[int(number)].load(saved)
        for client, saved in zip(self._clients, state["streams"], strict=True):
            client.load(saved)
        self._service.load(state["service"])
        self._service.replicate_anew()
        self._service.barrier()
        self._clients.restart_timing()

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        """Read and check the checkpoint of another number of workers; the returned function applies it."""
        clocks = old_clocks(old, len(self._clients))
        found: dict[int, dict[str, Any]] | None = None
        if old.size > 1:
            found = {}
            numels = [span.numel for span in self._shards.layout.spans]
            shards = OldShards(old, numels, self._context.rule.sharded)
            for client, clock in zip(self._clients, clocks, strict=True):
                alike = [(rank, clock) for rank in range(self._context.transport.world.size)]
                found |= resharded(shards, client.every, self._server.shards, alike)
        return lambda: self._begin(found, clocks)

    def _begin(self, found: dict[int, dict[str, Any]] | None, clocks: list[int]) -> None:
        """Load the shards found, or else the model and the optimizers; then all workers begin at the global model."""
        for span in self._shards.layout.spans:
            span.read(span.pulled)
        for number, state in (self._shards.from_one_worker() if found is None else found).items():
            self._server.shards[number].load(state)
        for client, clock in zip(self._clients, clocks, strict=True):
            client.clock = clock
        self._service.replicate_anew()
        self._service.barrier()  # no request before all owners are ready
        for client in self._clients:
            client.begin()
        self._service.barrier()
        self._clients.restart_timing()


class Asynchronous:
    """The engine of a run of several workers under an asynchronous rule."""

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
        self._unpushed = UnpushedSamples(context.loaders.take_marks, len(owned))
        self._service = self._connect()
        self._clients = self._make_clients()
        self._state = EngineState(context, self._shards, self._service, self._clients, flushes=self._gradient)
        self._made: set[int] = set()  # optimizers whose last step under the scaler was made
        self._watched: ScalerHook | None = None
        if scaler is not None and self._schedule.staleness is not None:  # other workers wait for this one's clock
            self._watched = ScalerHook(scaler, lambda one: self._made.discard(id(one)), self._is_ours, self._step_over)

    # -- setting up -------------------------------------------------------------------------------

    def _connect(self) -> Service:
        context, shards = self._context, self._shards
        transport, settings, owners = context.transport, context.settings, shards.layout.owners
        if transport.cluster is not None:
            return SimulatedService(transport, transport.cluster, shards.server, owners, shards.ledger)
        bounded = self._schedule.staleness is not None
        unpushed = lambda: [*self._unpushed.waiting, *context.loaders.holding()]  # noqa: E731
        elastic = self.rule.center_pull is not None
        data = DataAccess(shards.ledger, unpushed, lambda: self._clients.flush(), bounded, elastic, len(self._owned))
        return SocketService(transport, shards.server, owners, data, settings.timeout_s, settings.tls, self._monitor)

    def _make_clients(self) -> Clients:
        numbers, elastic = itertools.count(1), self.rule.center_pull
        workers, clients, shards = self._context.transport.world.size, list[Client](), self._shards
        for k, ((optimizer, _), spans) in enumerate(zip(self._owned, shards.parameters, strict=True)):
            context = ClientContext(self._service, numbers.__next__, partial(self._take_samples, k), self._tally)
            buffers = shards.buffers if k == len(self._owned) - 1 else []
            if self._gradient:
                clients.append(GradientClient(optimizer, context, self._schedule, spans, buffers))
            else:
                clients.append(DeltaClient(optimizer, elastic, workers, context, self._schedule, spans, buffers))
        return Clients([optimizer for optimizer, _ in self._owned], clients, self._context.tuner)

    def _take_samples(self, client: int) -> list[Mark]:
        """The sample ranges that go with a client's push: all that it has not pushed."""
        if client == 0:
            self._pushed = self._progress.steps + int(self._gradient)  # gradients go before their step is counted
        return self._unpushed.push(client)

    # -- steps ------------------------------------------------------------------------------------

    def keep_local(self, now: bool) -> None:
        self.local = now

    @property
    def gradients_due(self) -> bool:
        """Whether gradients are pushed before the next step."""
        return self._gradient and not self.closed

    def before_step(self, optimizer: Optimizer) -> None:
        """Push the gradients, and take the pulled values."""
        if skipped(optimizer):
            return
        self._made.add(id(optimizer))
        self._monitor.begin()
        began = time.perf_counter()
        self._compute()
        self._progress.check_unchanged(optimizer)
        waits = self._schedule.staleness is not None and self._context.settings.scaler is None
        if waits and (scaler := stepping_scaler()) is not None:
            refuse_hidden_scaler(self.rule, scaler, False)  # other workers wait for the clocks of skipped steps
        client = self._clients.of_gradients(optimizer)
        self._refuse_changes(client)
        client.before_step()
        self._report(began)

    def _refuse_changes(self, client: GradientClient) -> None:
        """Refuse what the program has changed since the last pull: the next one overwrites it."""
        if names := client.changed():
            raise UnsupportedError(
                self._context.transport.world.sign(
                    f"{', '.join(names)}: the program has changed these parameters since the last step, besides its "
                    f"optimizer (a clamp, a mask, a layer begun anew, a part that is loaded). Under {self.rule.text()} "
                    "the owners of the slices make the steps, so the change would be lost; use sync"
                )
            )

    def take_written(self) -> list[Fragment]:
        """Gradients leave nothing that a program may change (`before_step`)."""
        return [] if self._gradient else self._clients.take_written()

    def after_step(self, optimizer: Optimizer) -> None:
        """Give the gradients back after the optimizer's step."""
        if not self._gradient and not skipped(optimizer):
            self._made.add(id(optimizer))
        if self._gradient:
            self._clients.of_gradients(optimizer).after_step()

    def on_step(self, warm: bool) -> None:
        """Push and pull deltas after a minibatch."""
        if self._gradient:
            self._time_passed = False
            return
        self._monitor.begin()
        began = time.perf_counter()
        self._service.computed(self._progress.steps - 1)
        self._clients.on_step()
        self._report(began)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return not self.closed and any(optimizer is one for one, _ in self._owned)

    def _step_over(self, optimizer: Optimizer) -> None:
        """Advance the clock for a step that the scaler skipped."""
        if id(optimizer) in self._made:
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
        """Let simulated time pass, once a minibatch, however many optimizers there are."""
        if not self._time_passed:
            self._time_passed = True
            self._service.computed(self._progress.steps)

    def _report(self, began: float) -> None:
        """Write the results of pushes to the log."""
        self._tally.report(self._monitor, began, self.exchanged)

    # -- for the run -------------------------------------------------------------------------------

    @property
    def steps_committed(self) -> int:
        """The first so many minibatches of this worker are in the global model, or on their way."""
        return self._pushed

    @property
    def exchange_position(self) -> None:
        """None: workers have no common step."""

    @property
    def leases(self) -> Leases:
        """The worker's access to the ledger of the data."""
        return self._service.leases

    @property
    def exchanged(self) -> int:
        """Pushes that this worker has made."""
        return self._clients.pushes

    @property
    def global_model(self) -> OwnedShards | None:
        """The global model, where the user's may differ from it."""
        return None if self.closed else self._shards

    # -- the end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Push the rest, wait for workers that have more data, and take the final model."""
        began = time.perf_counter()
        self._clients.flush()
        self._report(began)
        self._service.secure()
        self.leases.done(self._unpushed.rest())  # such as batches of a validation
        self._service.finish()
        final = False
        while not final:
            for client in self._clients:
                client.pull(peeks=False)
                self._look_at_buffers(client)
                client.write_pulled()
            final = self._service.confirm_final_model()

    def _look_at_buffers(self, client: Client) -> None:
        """Say which buffers are one worker's, before they are taken."""
        world = self._context.transport.world
        if world.rank == 1:
            others = [span for span in client.buffers if span.fragment.from_rank_0]
            apart = [names_apart(one.fragment, 0, one.read(host(one.fragment)), one.pulled) for one in others]
            say_apart(world, [name for names in apart for name in names])

    def retune(self) -> None:
        """Does nothing: each worker applies changes by itself."""

    def follow(self, rule: Rule) -> None:
        """Change the period, from the next block on."""
        self.rule, self._schedule = rule, rule.bounded
        self._shards.follow(rule)
        self._clients.follow(rule.bounded)

    def close(self) -> None:
        """Close the connections."""
        self.closed = True
        exit_handling.release(self._owned)
        if self._watched is not None:
            self._watched.remove()
        self._service.close()

    # -- checkpoints ------------------------------------------------------------------------------

    def merge(self) -> None:
        """Push the rest of a block, and take what all workers have pushed."""
        self._state.gather(whole=True)

    def state(self) -> dict[str, Any]:
        """This worker's part of a checkpoint; a barrier of all workers."""
        return self._state.state()

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave, after the optimizers."""
        self._state.load(state)

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        """Read and check the checkpoint of another number of workers; the returned function applies it.

        Before that call the user's model must hold the global model, and the optimizers their restored state.
        """
        return self._state.reshard(old)
