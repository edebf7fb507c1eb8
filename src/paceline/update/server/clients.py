# SPDX-License-Identifier: Apache-2.0
"""The clients of a worker: one for each optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.optim import Optimizer

from paceline.core.flat import Fragment
from paceline.data.ledger.epoch_ledger import Mark
from paceline.rules.schedule.bounded import Bounded
from paceline.tuning.tuner import Tuner
from paceline.update.server.client import Client
from paceline.update.server.delta_client import DeltaClient
from paceline.update.server.gradient_client import GradientClient


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
