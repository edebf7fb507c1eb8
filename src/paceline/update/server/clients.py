# SPDX-License-Identifier: Apache-2.0
"""The clients of a worker: one for each optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.optim import Optimizer

from paceline.core.flat import Fragment
from paceline.rules.schedule.bounded import Bounded
from paceline.tuning.tuner import Tuner
from paceline.update.server.client import Client
from paceline.update.server.delta_client import DeltaClient
from paceline.update.server.gradient_client import GradientClient


@dataclass(frozen=True)
class Clients:
    """The clients of a worker.

    Attributes:
        optimizers: of the run.
        clients: one for each optimizer, in the same order.
        tuner: has the learning rates of the steps.
    """

    optimizers: list[Optimizer]
    clients: list[Client]
    tuner: Tuner

    def __iter__(self) -> Iterator[Client]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)

    def of_gradients(self, optimizer: Optimizer) -> GradientClient:
        """The client of an optimizer, under rules that push gradients."""
        client = next(client for client, one in zip(self.clients, self.optimizers, strict=True) if one is optimizer)
        assert isinstance(client, GradientClient)
        return client

    @property
    def pushes(self) -> int:
        """Pushes that this worker has made."""
        return max(client.clock for client in self.clients)

    def on_step(self) -> None:
        """Note a step, under rules that push deltas."""
        for client in self.clients:
            assert isinstance(client, DeltaClient)
            client.on_step()

    def take_written(self) -> list[Fragment]:
        """The parameters that answers have changed since the last call, under rules that push deltas."""
        return [part for one in self.clients if isinstance(one, DeltaClient) for part in one.take_written()]

    def flush(self) -> None:
        """Push the rest, with the learning rates of the steps."""
        with self.tuner.tunables.rates.applied():
            for client in self.clients:
                client.flush()

    def follow(self, schedule: Bounded) -> None:
        """Change the period."""
        for client in self.clients:
            client.follow(schedule)

    def wait(self) -> None:
        """Finish the exchanges under way."""
        for client in self.clients:
            client.wait()

    def pull(self, peeks: bool) -> None:
        """Pull without a push; with `peeks` only the anchors of the global model change."""
        for client in self.clients:
            client.pull(peeks)

    def restart_timing(self) -> None:
        """Time the next minibatch from now, after a barrier."""
        for client in self.clients:
            client.restart_timing()
