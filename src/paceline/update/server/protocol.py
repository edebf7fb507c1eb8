# SPDX-License-Identifier: Apache-2.0
"""Requests to the owners of shards, and delayed actions."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark
from paceline.update.server.shard import LEDGER_SHARD, REFUSED, GroupSettings, IncomingPush


class Timers:
    """Runs actions at their time; `run` is the body of a thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = runtime.Condition()
        self._number, self._over = 0, False

    def put(self, after_s: float, action: Callable[[], None]) -> None:
        """Run an action in `after_s` seconds."""
        with self._changed:
            self._number += 1
            heapq.heappush(self._due, (runtime.monotonic() + after_s, self._number, action))
            self._changed.notify()

    def run(self) -> None:
        """Run what is due, until `close`."""
        while (action := self._next()) is not None:
            action()

    def _next(self) -> Callable[[], None] | None:
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
        news: the ledger's news that came with the answer.
    """

    shard: int
    span: int
    values: Tensor | None
    out: Tensor | None
    version: int
    news: Any = None


@dataclass
class PendingExchange:
    """An exchange under way.

    Attributes:
        number: of this exchange among the worker's.
        requests: shard -> its part.
        clock: the clock that the worker reaches with this push; 0 for a bare pull.
        minibatches: that the push counts for.
        settings: of the optimizers' groups, by span.
        peeks: whether no gradient will be computed at the values of a bare pull.
        marks: sample ranges that the push was computed on.
        release: called when the pushed values are not needed any more.
        requested: whether its requests were sent; a delayed pull may be sent by a timer, or earlier.
        requested_at, answered_at: seconds on the service's clock.
        done: whether all requests are answered.
        delay: the largest delay of its shards.
        refused: whether an owner refused a push.
    """

    number: int
    requests: dict[int, ShardRequest]
    clock: int = 0
    minibatches: int = 1
    peeks: bool = False
    settings: dict[int, GroupSettings] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    release: Callable[[], None] = lambda: None
    requested: bool = field(default=False, init=False)
    requested_at: float = field(default=0.0, init=False)
    answered_at: float = field(default=0.0, init=False)
    delay: int = field(default=0, init=False)
    done: bool = field(default=False, init=False)
    refused: bool = field(default=False, init=False)
    _answered: set[int] = field(default_factory=set, init=False)

    def request(self, shard: int) -> ShardRequest | None:
        """The request to `shard`, if it is not answered yet."""
        return None if shard in self._answered else self.requests.get(shard)

    def answered(self, shard: int, version: int, delay: int, news: Any = None) -> None:
        """Note an answer, whose values have been received."""
        request = self.request(shard)
        if request is None:
            return
        request.version, request.news = version, news
        self.refused = self.refused or delay == REFUSED
        if request.values is not None:
            self.delay = max(self.delay, delay)
        self._answered.add(shard)
        self.done = len(self._answered) == len(self.requests)

    def incoming(self, sender: int, request: ShardRequest) -> IncomingPush:
        """The description of one shard's push for its owner."""
        settings = self.settings.get(request.span, {})
        return IncomingPush(sender, self.clock, request.version, self.minibatches, settings, self.marks)

    @property
    def counts_samples(self) -> bool:
        """Whether it pushes to the first shard, whose pushes count the samples."""
        request = self.requests.get(LEDGER_SHARD)
        return request is not None and request.values is not None

    @property
    def waiting(self) -> list[ShardRequest]:
        """The requests that are not answered."""
        return [request for shard, request in self.requests.items() if shard not in self._answered]
