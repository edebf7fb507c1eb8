# SPDX-License-Identifier: Apache-2.0
"""What a worker pushes and pulls for one optimizer, over time.

    gradients        at the end of step c:  take the values that have come, push g_c, and ask for the next values when
                     step c + 1 is nearly over (:mod:`.prefetch`); theta is what was pulled last, and nothing else
    blocks           after `period` steps:  push d = theta - base, and go on;
                     when the answer s comes:  theta = s + (theta - then),  base = s
    elastic          after `period` steps:  push x = theta, and go on;
                     when the center c comes:  theta = theta - alpha (x - c)

`base` is where the displacement is measured from, `then` the parameters when they were pushed. That is an overlap of 1;
with 0 a worker asks with its push, and waits for the answer. While an answer is late, work is gathered, and only when
the schedule's `hold` is reached does the worker wait.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from paceline.data.ledger.epoch_ledger import Mark
from paceline.rules.schedule.bounded import Bounded
from paceline.update.server.protocol import PendingExchange, Service, ShardRequest
from paceline.update.server.shard import LEDGER_SHARD
from paceline.update.server.sharding import BufferPool, Span
from paceline.update.server.tally import ExchangeTally


@dataclass(frozen=True)
class ClientContext:
    """What the clients of a worker share.

    Attributes:
        service: the way to the owners.
        number: gives each exchange its number.
        places: gives the places of the data that go with the next push.
        tally: counts.
    """

    service: Service
    number: Callable[[], int]
    places: Callable[[], list[Mark]]
    tally: ExchangeTally


def _nothing() -> None:
    """Nothing is left to ask."""


def _give_back(taken: list[tuple[BufferPool, Tensor]]) -> None:
    """Nobody needs pushed values any more."""
    for pool, flat in taken:
        pool.give(flat)


class Client(ABC):
    """The exchanges of one optimizer's parameters.

    Args:
        context: what the clients of this worker share.
        schedule: when to exchange, and how far a worker may be ahead.
        spans: the parameters.
        buffers: the model's buffers, where they go with these parameters.
    """

    def __init__(self, context: ClientContext, schedule: Bounded, spans: list[Span], buffers: list[Span]) -> None:
        self.spans, self.buffers = spans, buffers
        self._context, self._service, self._tally = context, context.service, context.tally
        self._schedule = schedule
        self._pending: PendingExchange | None = None
        self._silent: PendingExchange | None = None  # a push whose answer holds no values
        self._hurry: Callable[[], None] = _nothing  # asks at once for what is to be asked for later
        self._pools = [BufferPool(span.fragment) for span in spans]
        self._buffer_pools = [BufferPool(span.fragment) for span in buffers]
        self.clock = 0

    def follow(self, schedule: Bounded) -> None:
        """Go on with blocks of another length."""
        self._schedule = schedule

    @property
    def every(self) -> list[Span]:
        """Parameters, and the buffers that go with them."""
        return [*self.spans, *self.buffers]

    # -- exchanges --------------------------------------------------------------------------------

    def _push(self, values: Sequence[Tensor], minibatches: int, answered: bool = True) -> PendingExchange:
        """Send `values`, one flat tensor of each span's rooms; ask for what the owners make of it, where wanted."""
        requests: list[ShardRequest] = []
        for span, flat in zip(self.spans, values, strict=True):
            requests += span.requests(flat, answered)
        taken = list(zip(self._pools, values, strict=True))
        for span, pool in zip(self.buffers, self._buffer_pools, strict=True):
            flat = pool.take()
            taken.append((pool, flat))
            if not span.fragment.finite():  # a batch with nan has been through a BatchNorm; it would keep it for ever
                span.write(span.pulled)
            span.mark()
            requests += span.requests(span.read(flat), answered)
        self.clock += 1
        settings = {span.number: span.settings() for span in self.spans}
        pending = PendingExchange(
            self._context.number(), requests, self.clock, minibatches, settings=settings, marks=self._context.places()
        )
        pending.release = partial(_give_back, taken)
        self._service.exchange(pending)
        return pending

    def _collect(self, wait: bool) -> None:
        """Take the answer of the exchange under way, where it is there or is waited for."""
        under_way = [pending for pending in (self._silent, self._pending) if pending is not None]
        if not under_way or not (wait or all(self._service.done(pending) for pending in under_way)):
            return
        began = time.perf_counter()
        self._hurry()
        for pending in under_way:
            self._service.wait(pending)
            if pending.refused:
                self._tally.refused += 1
            elif pending.clock:
                self._tally.delays.append(pending.delay)
        self._tally.wait_s += time.perf_counter() - began
        self._silent, self._pending, self._hurry = None, None, _nothing
        self._answered(under_way[-1])
        self._take(under_way[-1])
        self._land()

    def _answered(self, pending: PendingExchange) -> None:
        """Values have come; how long they took is of interest where they are asked for late."""
        return

    @abstractmethod
    def _land(self) -> None:
        """Give the parameters what was pulled."""

    @abstractmethod
    def flush(self) -> None:
        """Push what is left, and wait for the answer."""

    def pull(self, peeks: bool) -> None:
        """Pull without a push; with nothing under way."""
        pending = self._question(peeks)
        self._service.exchange(pending)
        self._service.wait(pending)
        if peeks:
            for span in self.every:
                span.anchor = span.incoming.clone()
        else:
            self._take(pending)

    def _question(self, peeks: bool = False) -> PendingExchange:
        """A bare pull of everything."""
        return PendingExchange(
            self._context.number(), [request for span in self.every for request in span.requests(None)], peeks=peeks
        )

    def _take(self, pending: PendingExchange) -> None:
        """What has arrived is what was pulled last."""
        requests = {request.shard: request for request in pending.requests}
        with self._service.taking():
            for span in self.every:
                span.take(requests)
            if LEDGER_SHARD in requests and requests[LEDGER_SHARD].news is not None:
                self._service.leases.learn(requests[LEDGER_SHARD].news)

    def wait(self) -> None:
        """Take what is under way."""
        self._collect(wait=True)

    def restart_timing(self) -> None:
        """All workers have come to rest, for a checkpoint: the next minibatch begins now."""
        return

    def write_pulled(self) -> None:
        """Leave the global values in the user's tensors."""
        for span in self.every:
            span.write(span.pulled)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, with nothing under way."""
        return {
            "clock": self.clock,
            "pulled": [span.pulled for span in self.every],
            "versions": [[one.version for one in span.ranges] for span in self.every],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        self.clock = int(state["clock"])
        for span, pulled, versions in zip(self.every, state["pulled"], state["versions"], strict=True):
            span.pulled.copy_(pulled)
            for one, version in zip(span.ranges, versions, strict=True):
                one.version = int(version)

    def begin(self) -> None:
        """Go on from the global model, as a worker that has nothing of its own; with nothing under way."""
        self.pull(peeks=False)
        self.write_pulled()
