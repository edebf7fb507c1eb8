# SPDX-License-Identifier: Apache-2.0
"""The clients of a worker: one for each optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.optim import Optimizer

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
        tuner: knows the learning rates with which steps are made.
    """

    optimizers: list[Optimizer]
    clients: list[Client]
    tuner: Tuner

    def __iter__(self) -> Iterator[Client]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)

    def of(self, optimizer: Optimizer) -> Client:
        """The client of an optimizer."""
        return next(client for client, one in zip(self.clients, self.optimizers, strict=True) if one is optimizer)

    def of_gradients(self, optimizer: Optimizer) -> GradientClient:
        """The same, under rules that push gradients."""
        client = self.of(optimizer)
        assert isinstance(client, GradientClient)
        return client

    @property
    def pushes(self) -> int:
        """Pushes that this worker has made."""
        return max(client.clock for client in self.clients)

    def on_step(self) -> None:
        """A step was made, under rules that push displacements."""
        for client in self.clients:
            assert isinstance(client, DeltaClient)
            client.on_step()

    def flush(self) -> None:
        """Push what is left, with the rates with which steps are made."""
        with self.tuner.tunables.rates.applied():
            for client in self.clients:
                client.flush()

    def follow(self, schedule: Bounded) -> None:
        """Go on with blocks of another length."""
        for client in self.clients:
            client.follow(schedule)

    def wait(self) -> None:
        """Take what is under way."""
        for client in self.clients:
            client.wait()

    def pull(self, peeks: bool) -> None:
        """Pull everything without a push; with `peeks` only the anchors of the global model change."""
        for client in self.clients:
            client.pull(peeks)

    def restart_timing(self) -> None:
        """All workers were at one point together: the next minibatch begins now."""
        for client in self.clients:
            client.restart_timing()
