# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of an asynchronous run, which all workers save at a barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.update.engine.context import RunContext
from paceline.update.server.clients import Clients
from paceline.update.server.owned_shards import OwnedShards
from paceline.update.server.protocol import Service
from paceline.update.server.reshard import OldShards, old_clocks, resharded


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
                the living ones pushed, so that these take the same values.
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
        states: dict[int, dict[str, Any]] | None = None
        if old.size > 1:
            states = {}
            numels = [span.numel for span in self._shards.layout.spans]
            shards = OldShards(old, numels, self._context.rule.sharded)
            for client, clock in zip(self._clients, clocks, strict=True):
                alike = [(rank, clock) for rank in range(self._context.transport.world.size)]
                states |= resharded(shards, client.every, self._server.shards, alike)
        return lambda: self._begin(states, clocks)

    def _begin(self, states: dict[int, dict[str, Any]] | None, clocks: list[int]) -> None:
        """Load the shards found, or else the model and the optimizers; then all workers begin at the global model."""
        for span in self._shards.layout.spans:
            span.read(span.pulled)
        for number, state in (self._shards.from_one_worker() if states is None else states).items():
            self._server.shards[number].load(state)
        for client, clock in zip(self._clients, clocks, strict=True):
            client.clock = clock
        self._service.replicate_anew()
        self._service.barrier()  # no request before all owners are ready
        for client in self._clients:
            client.begin()
        self._service.barrier()
        self._clients.restart_timing()
