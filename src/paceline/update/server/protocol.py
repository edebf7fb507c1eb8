# SPDX-License-Identifier: Apache-2.0
"""Requests to the owners of shards, the protocol of the services that carry them, and delayed actions."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.leases import Leases
from paceline.update.server.shard import LEDGER_SHARD, REFUSED, GroupSettings, IncomingPush


class Once:
    """An action that runs at the first call only."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action, self._taken = action, runtime.Lock()

    def __call__(self) -> None:
        """Run the action, unless it ran before."""
        if self._taken.acquire(blocking=False):
            self._action()


class Timers:
    """Runs actions at their time; `run` is the body of a thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Once]] = []
        self._changed = runtime.Condition()
        self._number, self._over = 0, False

    def put(self, after_s: float, once: Once) -> None:
        """Run an action in `after_s` seconds."""
        with self._changed:
            self._number += 1
            heapq.heappush(self._due, (runtime.monotonic() + after_s, self._number, once))
            self._changed.notify()

    def run(self) -> None:
        """Run what is due, until `close`."""
        while (once := self._next()) is not None:
            once()

    def _next(self) -> Once | None:
        with self._changed:
            while not self._over:
                left = self._due[0][0] - runtime.monotonic() if self._due else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left)
        return None

    def close(self) -> None:
        """Drop all pending actions."""
        with self._changed:
            self._over = True
            self._changed.notify()


@dataclass
class ShardRequest:
    """One shard's part of an exchange.

    Attributes:
        shard: its number.
        span: number of the span, whose settings go with it.
        values: the push, shape (n,), unchanged until the exchange is over; None for a pull.
        out: memory for the answer, shape (n,); None where no values are wanted.
        version: of the values at which `values` were computed; afterwards, of the answer.
        delay: as the owner measured it, or `REFUSED`.
        news: the ledger's news that came with the answer.
    """

    shard: int
    span: int
    values: Tensor | None
    out: Tensor | None
    version: int
    delay: int = 0
    news: Any = None


@dataclass
class PendingExchange:
    """An exchange under way.

    Attributes:
        number: of this exchange among the worker's.
        requests: one for each shard.
        clock: the clock that the worker reaches with this push; 0 for a bare pull.
        minibatches: that the push stands for.
        settings: of the optimizers' groups, by span.
        peeks: whether no gradient will be computed at the values of a bare pull.
        marks: sample ranges that the push was computed on.
        requested_at, answered_at: seconds on the service's clock.
        release: called when the pushed values are not needed any more.
    """

    number: int
    requests: Sequence[ShardRequest]
    clock: int = 0
    minibatches: int = 1
    peeks: bool = False
    settings: dict[int, GroupSettings] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    requested_at: float = field(default=0.0, init=False)
    answered_at: float = field(default=0.0, init=False)
    release: Callable[[], None] = field(init=False, default_factory=lambda: lambda: None)

    def __post_init__(self) -> None:
        self._open = {request.shard: request for request in self.requests}

    def request(self, shard: int) -> ShardRequest | None:
        """The request to `shard`, if it is not answered yet."""
        return self._open.get(shard)

    def answered(self, shard: int, version: int, delay: int, news: Any = None) -> None:
        """Note an answer, whose values have been received."""
        request = self._open.pop(shard, None)
        if request is not None:
            request.version, request.delay, request.news = version, delay, news

    def incoming(self, sender: int, request: ShardRequest) -> IncomingPush:
        """The description of one shard's push for its owner."""
        settings = self.settings.get(request.span, {})
        return IncomingPush(sender, self.clock, request.version, self.minibatches, settings, self.marks)

    @property
    def counts_samples(self) -> bool:
        """Whether it pushes to the first shard, whose pushes count the samples."""
        return any(request.shard == LEDGER_SHARD and request.values is not None for request in self.requests)

    @property
    def waiting(self) -> list[ShardRequest]:
        """The requests that are not answered."""
        return list(self._open.values())

    @property
    def done(self) -> bool:
        """Whether all requests are answered."""
        return not self._open

    @property
    def delay(self) -> int:
        """The largest delay of its shards."""
        return max(
            (request.delay for request in self.requests if request.values is not None and request.delay != REFUSED),
            default=0,
        )

    @property
    def refused(self) -> bool:
        """Whether an owner refused a push."""
        return any(request.delay == REFUSED for request in self.requests)


class Service(Protocol):
    """A worker's access to the owners of shards and to the other workers."""

    @property
    def leases(self) -> Leases:
        """The worker's access to the ledger of the data."""

    def computed(self, step: int) -> None:
        """Note that this worker has computed its minibatch number `step` (the first is 0)."""

    def now(self) -> float:
        """Seconds on the service's clock, real or simulated."""

    def exchange(self, pending: PendingExchange) -> None:
        """Start an exchange; first wait where too many pushes are not replicated yet."""

    def exchange_later(self, pending: PendingExchange, after_s: float) -> Once:
        """Start an exchange in `after_s` seconds, or earlier when the returned function is called."""

    def done(self, pending: PendingExchange) -> bool:
        """Whether it is answered; raises the failure of this worker."""

    def wait(self, pending: PendingExchange) -> None:
        """Wait until it is answered."""

    def taking(self) -> AbstractContextManager[object]:
        """Context without failovers, so that the pulled values and the ledger's news stay consistent."""

    def secure(self, idle: bool = True) -> None:
        """Wait until no push of this worker can be lost with one owner.

        Args:
            idle: whether other workers need not wait for this worker's clock until its next push.
        """

    def replicate_anew(self) -> None:
        """Replicate this worker's shards after a checkpoint replaced them; call before `barrier`."""

    def barrier(self, of_all: bool = True) -> None:
        """Wait until every worker is here, with no exchange under way.

        Args:
            of_all: whether a lost worker is missed, too; else the living ones meet.
        """

    def finish(self) -> None:
        """Announce that this worker has no more to push, and wait until no worker has."""

    def confirm_final_model(self) -> bool:
        """Wait until all workers have the final model, after which no worker sends a request.

        False where a worker was lost meanwhile: this worker has to pull the final model again.
        """

    def close(self) -> None:
        """Close all connections at once."""

    def state(self) -> dict[str, Any]:
        """The service's part of a checkpoint."""

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave."""
