# SPDX-License-Identifier: Apache-2.0
"""The pushes and pulls of one optimizer on a worker.

    gradients        at the end of step c:  take the values that have come, push g_c, and ask for the next values when
                     step c + 1 is nearly over (:mod:`.prefetch`); theta is what was pulled last, and nothing else
    blocks           after `period` steps:  push d = theta - base, and go on;
                     when the answer s comes:  theta = s + (theta - then),  base = s
    elastic          after `period` steps:  push x = theta, and go on;
                     when the center c comes:  theta = theta - alpha (x - c)

`base` is where the displacement d is measured from, `then` the parameters when they were pushed. That is an overlap of
1; with 0 a worker pulls with its push, and waits for the answer. While an answer is late, the worker gathers work; it
waits only when the schedule's `hold` is reached.
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
from paceline.update.exchange.header import Timing
from paceline.update.monitor import Monitor
from paceline.update.server.protocol import PendingExchange, Service, ShardRequest
from paceline.update.server.shard import LEDGER_SHARD
from paceline.update.server.sharding import BufferPool, Span


class ExchangeTally:
    """The results of pushes since the last line of the log.

    Attributes:
        delays: of the pushes that were answered.
        refused: pushes that were not finite.
        wait_s: seconds that the worker waited for answers.
    """

    def __init__(self) -> None:
        self.delays: list[int] = []
        self.refused = 0
        self.wait_s = 0.0

    def report(self, monitor: Monitor, began: float, pushes: int) -> None:
        """Write the counts to the log, and reset them.

        Args:
            monitor: of the run.
            began: when the exchange began, by `time.perf_counter`.
            pushes: that this worker has made.
        """
        for delay in self.delays:
            monitor.pushed(delay)
        if self.refused:
            monitor.refused(self.refused)
        if self.delays or self.refused:
            timing = Timing(wait_s=self.wait_s, exchange_s=max(0.0, time.perf_counter() - began - self.wait_s))
            monitor.end(timing, None, block=pushes, warmup=False)
        else:
            monitor.sent()
        self.delays, self.refused, self.wait_s = [], 0, 0.0


@dataclass(frozen=True)
class ClientContext:
    """What the clients of a worker share.

    Attributes:
        service: the connections to the owners.
        number: gives each exchange its number.
        samples: gives the sample ranges that go with the next push.
        tally: counts the results of pushes.
    """

    service: Service
    number: Callable[[], int]
    samples: Callable[[], list[Mark]]
    tally: ExchangeTally


def _nothing() -> None:
    """No delayed pull is under way."""


def _give_back(taken: list[tuple[BufferPool, Tensor]]) -> None:
    for pool, flat in taken:
        pool.give(flat)


class Client(ABC):
    """The exchanges of one optimizer's parameters.

    Args:
        context: what the clients of this worker share.
        schedule: when to exchange, and how far a worker may be ahead.
        spans: the parameters.
        buffers: the model's buffers, if they go with these parameters.
    """

    def __init__(self, context: ClientContext, schedule: Bounded, spans: list[Span], buffers: list[Span]) -> None:
        self.spans, self.buffers = spans, buffers
        self._context, self._service, self._tally = context, context.service, context.tally
        self._schedule = schedule
        self._pending: PendingExchange | None = None
        self._unanswered: PendingExchange | None = None  # a push whose answer holds no values
        self._pull_now: Callable[[], None] = _nothing  # starts a delayed pull at once
        self._pools = [BufferPool(span.fragment) for span in spans]
        self._buffer_pools = [BufferPool(span.fragment) for span in buffers]
        self.clock = 0

    def follow(self, schedule: Bounded) -> None:
        """Change the period."""
        self._schedule = schedule

    @property
    def every(self) -> list[Span]:
        """The parameters, and the buffers that go with them."""
        return [*self.spans, *self.buffers]

    # -- exchanges --------------------------------------------------------------------------------

    def _push(self, values: Sequence[Tensor], minibatches: int, answered: bool = True) -> PendingExchange:
        """Push `values`, a flat tensor of each span's pool; with `answered` pull the result."""
        requests: list[ShardRequest] = []
        for span, flat in zip(self.spans, values, strict=True):
            requests += span.requests(flat, answered)
        taken = list(zip(self._pools, values, strict=True))
        for span, pool in zip(self.buffers, self._buffer_pools, strict=True):
            flat = pool.take()
            taken.append((pool, flat))
            span.fragment.reset_nonfinite(span.pulled)  # else a BatchNorm would stay nan after one bad batch
            span.note_version()
            requests += span.requests(span.read(flat), answered)
        self.clock += 1
        settings = {span.number: span.settings() for span in self.spans}
        pending = PendingExchange(
            self._context.number(), requests, self.clock, minibatches, settings=settings, marks=self._context.samples()
        )
        pending.release = partial(_give_back, taken)
        self._service.exchange(pending)
        return pending

    def _collect(self, wait: bool) -> None:
        """Take the answer of the exchange under way, if it has arrived or `wait` is set."""
        under_way = [pending for pending in (self._unanswered, self._pending) if pending is not None]
        if not under_way or not (wait or all(self._service.done(pending) for pending in under_way)):
            return
        began = time.perf_counter()
        self._pull_now()
        for pending in under_way:
            self._service.wait(pending)
            if pending.refused:
                self._tally.refused += 1
            elif pending.clock:
                self._tally.delays.append(pending.delay)
        self._tally.wait_s += time.perf_counter() - began
        self._unanswered, self._pending, self._pull_now = None, None, _nothing
        self._answered(under_way[-1])
        self._take(under_way[-1])
        self._apply()

    def _answered(self, pending: PendingExchange) -> None:
        """Called with each answer, for clients that time their pulls."""
        return

    @abstractmethod
    def _apply(self) -> None:
        """Apply the pulled values to the parameters."""

    @abstractmethod
    def flush(self) -> None:
        """Push the rest, and wait for the answer."""

    def pull(self, peeks: bool) -> None:
        """Pull without a push, with no exchange under way."""
        pending = self._bare_pull(peeks)
        self._service.exchange(pending)
        self._service.wait(pending)
        if peeks:
            for span in self.every:
                span.exported = span.incoming.clone()
        else:
            self._take(pending)

    def _bare_pull(self, peeks: bool = False) -> PendingExchange:
        return PendingExchange(
            self._context.number(), [request for span in self.every for request in span.requests(None)], peeks=peeks
        )

    def _take(self, pending: PendingExchange) -> None:
        """Make the values that arrived the ones pulled last."""
        requests = {request.shard: request for request in pending.requests}
        with self._service.taking():
            for span in self.every:
                span.take(requests)
            if LEDGER_SHARD in requests and requests[LEDGER_SHARD].news is not None:
                self._service.leases.learn(requests[LEDGER_SHARD].news)

    def wait(self) -> None:
        """Finish the exchange under way."""
        self._collect(wait=True)

    def restart_timing(self) -> None:
        """Time the next minibatch from now, after a barrier."""
        return

    def write_pulled(self) -> None:
        """Write the global values to the user's tensors."""
        for span in self.every:
            span.write(span.pulled)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The client's part of a checkpoint, with no exchange under way."""
        return {
            "clock": self.clock,
            "pulled": [span.pulled for span in self.every],
            "versions": [[one.version for one in span.ranges] for span in self.every],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave."""
        self.clock = int(state["clock"])
        for span, pulled, versions in zip(self.every, state["pulled"], state["versions"], strict=True):
            span.pulled.copy_(pulled)
            for one, version in zip(span.ranges, versions, strict=True):
                one.version = int(version)

    def begin(self) -> None:
        """Start from the global model, with no exchange under way."""
        self.pull(peeks=False)
        self.write_pulled()
