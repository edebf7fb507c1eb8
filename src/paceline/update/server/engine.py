# SPDX-License-Identifier: Apache-2.0
"""The engine of asynchronous rules: a worker's pushes and pulls, the shards that it serves, and the end of the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core.flat import Fragment
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.update.engine import exit_handling
from paceline.update.engine.agreement import begin_together
from paceline.update.engine.blocks.outer_state import names_apart, say_apart
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import ScalerHook, refuse_hidden_scaler, stepping_scaler
from paceline.update.monitor import skipped
from paceline.update.server.client import (
    Client,
    ClientContext,
    DeltaClient,
    ExchangeTally,
    GradientClient,
    Service,
    UnpushedSamples,
    host,
)
from paceline.update.server.ledger_client import DataAccess
from paceline.update.server.sharding import OwnedShards, check_optimizer
from paceline.update.server.simulated_service import SimulatedService
from paceline.update.server.socket_service import SocketService


class Asynchronous:
    """The engine of a run of several workers under an asynchronous rule."""

    keeps_steps = True
    exchange_position = None  # workers have no common step

    def __init__(self, context: RunContext) -> None:
        rule, owned, scaler = context.rule, context.owned, context.settings.scaler
        self.rule, self._schedule, self._context, self._owned = rule, rule.bounded, context, owned
        self._monitor, self._progress = context.monitor, context.progress
        self.closed = self.local = False
        self._gradient = rule.steps_at_owners
        self._tally = ExchangeTally(context.monitor)
        self._time_passed = False  # whether simulated time has passed for the step under way
        for optimizer, _ in owned:
            check_optimizer(rule, optimizer)
        begin_together(context.transport, rule, context.model, owned, {"seed": context.settings.seed})
        self._shards = OwnedShards(context)
        # Gradients go before their step is counted.
        steps = lambda: self._progress.steps + int(self._gradient)  # noqa: E731
        self._unpushed = UnpushedSamples(context.loaders.take_marks, len(owned), steps)
        self._service = self._connect()
        self.leases = self._service.leases
        self._clients = self._make_clients()
        self._client_of = {id(optimizer): one for (optimizer, _), one in zip(owned, self._clients, strict=True)}
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
        data = DataAccess(shards.ledger, unpushed, lambda: self._flush(), bounded, elastic, len(self._owned))
        return SocketService(transport, shards.server, owners, data, settings.timeout_s, settings.tls, self._monitor)

    def _make_clients(self) -> list[GradientClient] | list[DeltaClient]:
        number, shards = itertools.count(1).__next__, self._shards
        rows = list[tuple[Optimizer, ClientContext]]()
        for k, ((optimizer, _), spans) in enumerate(zip(self._owned, shards.parameters, strict=True)):
            samples, buffers = partial(self._unpushed.push, k), shards.buffers if k == len(self._owned) - 1 else []
            context = ClientContext(self._service, number, samples, self._tally, self._schedule, spans, buffers)
            rows.append((optimizer, context))
        if self._gradient:
            return [GradientClient(*row) for row in rows]
        elastic, workers = self.rule.center_pull, self._context.transport.world.size
        return [DeltaClient(*row, elastic, workers) for row in rows]

    # -- steps ------------------------------------------------------------------------------------

    def keep_local(self, now: bool) -> None:
        self.local = now

    @property
    def gradients_due(self) -> bool:
        return self._gradient and not self.closed

    def before_step(self, optimizer: Optimizer) -> None:
        """Push the gradients, and take the pulled values."""
        if skipped(optimizer):
            return
        self._made.add(id(optimizer))
        self._progress.check_unchanged(optimizer)
        self._monitor.begin()
        now = self._compute()
        waits = self._schedule.staleness is not None and self._context.settings.scaler is None
        if waits and (scaler := stepping_scaler()) is not None:
            refuse_hidden_scaler(self.rule, scaler, False)  # other workers wait for the clocks of skipped steps
        client = self._of_gradients(optimizer)
        if names := client.changed():  # the next pull would overwrite it
            raise UnsupportedError(
                self._context.transport.world.sign(
                    f"{', '.join(names)}: the program has changed these parameters since the last step, besides its "
                    f"optimizer (a clamp, a mask, a layer begun anew, a part that is loaded). Under {self.rule.text()} "
                    "the owners of the slices make the steps, so the change would be lost; use sync"
                )
            )
        client.before_step(now)
        self._tally.report(self._clients)

    def _of_gradients(self, optimizer: Optimizer) -> GradientClient:
        client = self._client_of[id(optimizer)]
        assert isinstance(client, GradientClient)
        return client

    def take_written(self) -> list[Fragment]:
        """The parameters that answers have changed since the last call; gradients leave nothing that a program may
        change (`before_step`)."""
        return [part for one in self._clients if isinstance(one, DeltaClient) for part in one.take_written()]

    def after_step(self, optimizer: Optimizer) -> None:
        if not self._gradient and not skipped(optimizer):
            self._made.add(id(optimizer))
        if self._gradient:
            self._of_gradients(optimizer).after_step()

    def on_step(self, warm: bool) -> None:
        """Push and pull deltas after a minibatch."""
        if self._gradient:
            self._time_passed = False
            return
        self._monitor.begin()
        self._push_deltas(self._progress.steps - 1)
        self._tally.report(self._clients)

    def _push_deltas(self, step: int) -> None:
        self._service.computed(step)
        for client in self._clients:
            assert isinstance(client, DeltaClient)
            client.on_step()

    def _flush(self) -> None:
        """Push the rest, with the learning rates of the steps."""
        with self._context.tuner.tunables.rates.applied():
            for client in self._clients:
                client.flush()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return not self.closed and any(optimizer is one for one, _ in self._owned)

    def _step_over(self, optimizer: Optimizer) -> None:
        """Advance the clock for a step that the scaler skipped."""
        if id(optimizer) in self._made:
            return
        self._monitor.begin()
        last = optimizer is self._owned[-1][0]
        if self._gradient:
            self._compute()
            self._of_gradients(optimizer).skip_step()
            self._time_passed = self._time_passed and not last
        elif last:
            self._push_deltas(self._progress.steps)
        self._tally.report(self._clients)

    def _compute(self) -> float:
        """Let simulated time pass, once a minibatch, however many optimizers there are; the time then."""
        if self._time_passed:
            return self._service.now()
        self._time_passed = True
        return self._service.computed(self._progress.steps)

    # -- for the run -------------------------------------------------------------------------------

    @property
    def steps_committed(self) -> int:
        """The first so many minibatches of this worker are in the global model, or on their way."""
        return self._unpushed.pushed

    @property
    def exchanged(self) -> int:
        """Pushes that this worker has made."""
        return max(client.clock for client in self._clients)

    @property
    def global_model(self) -> OwnedShards | None:
        return None if self.closed else self._shards

    # -- the end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Push the rest, wait for workers that have more data, and take the final model."""
        self._flush()
        self._tally.report(self._clients)
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
        for client in self._clients:
            client.follow(rule.bounded)

    retuned = follow  # there is no other change

    def close(self) -> None:
        self.closed = True
        exit_handling.release(self._owned)
        if self._watched is not None:
            self._watched.remove()
        self._service.close()

    # -- checkpoints ------------------------------------------------------------------------------

    def merge(self) -> None:
        """Push the rest of a block, and take what all workers have pushed."""
        self._gather(whole=True)

    def _gather(self, whole: bool) -> None:
        """Finish all exchanges, and wait for all workers; `whole`: push the steps of an unfinished block, too, and go
        on without lost workers, since two owners have what the living ones pushed."""
        self.leases.waits(True)  # other workers may have to begin the next epoch before they come here
        if self._gradient or whole:
            self._flush()
        for client in self._clients:
            client.wait()
        self._service.secure(idle=False)
        self._service.barrier(of_all=not whole)
        for client in self._clients:
            client.pull(peeks=True)
        self._service.barrier(of_all=not whole)  # so that all save the same clock
        self._restart_timing()
        self.leases.waits(False)

    def _restart_timing(self) -> None:
        for client in self._clients:
            client.restart_timing()

    def state(self) -> dict[str, Any]:
        """This worker's part of a checkpoint; a barrier of all workers."""
        self._gather(whole=False)
        return {
            "service": self._service.state(),
            "pieces": {str(number): shard.state() for number, shard in self._shards.server.shards.items()},
            "streams": [client.state() for client in self._clients],
        }

    def load(self, state: dict[str, Any]) -> None:
        for number, saved in state["pieces"].items():
            self._shards.server.shards[int(number)].load(saved)
        for client, saved in zip(self._clients, state["streams"], strict=True):
            client.load(saved)
        self._service.load(state["service"])
        self._service.replicate_anew()
        self._service.barrier()
        self._restart_timing()

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        # of each client the clock of rank 0, with which all workers resume
        clocks = [int(old.part(0, "exchange", "streams", k, "clock") or 0) for k in range(len(self._clients))]
        return partial(self._begin, self._shards.resharded(old, clocks) if old.size > 1 else None, clocks)

    def _begin(self, states: dict[int, dict[str, Any]] | None, clocks: list[int]) -> None:
        """Load the shards, or else the model and the optimizers; then all workers begin at the global model."""
        for span in self._shards.layout.spans:
            span.read(span.pulled)
        for number, state in (self._shards.from_one_worker() if states is None else states).items():
            self._shards.server.shards[number].load(state)
        self._service.replicate_anew()
        self._service.barrier()  # no request before all owners are ready
        for client, clock in zip(self._clients, clocks, strict=True):
            client.begin(clock)
        self._service.barrier()
        self._restart_timing()
