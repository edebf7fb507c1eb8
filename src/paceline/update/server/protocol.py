# SPDX-License-Identifier: Apache-2.0
"""How a worker's questions reach the owners of shards and come back, whatever carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.leases import Leases
from paceline.update.server.shard import LEDGER_SHARD, REFUSED
from paceline.update.server.shard_updates import GroupSettings
from paceline.update.server.timers import Once


def _nothing() -> None:
    """Nothing is to be let go."""


@dataclass
class ShardRequest:
    """One shard's part of an exchange.

    Attributes:
        shard: its number.
        span: which settings go with it.
        values: what is pushed, shape (n,), untouched until the exchange is over; None only pulls.
        out: where the answer goes, shape (n,); None where the values are not asked for.
        version: of the values at which `values` were computed; afterwards, of the answer.
        delay: what the owner measured, or `REFUSED`.
        news: what of the ledger goes with the answer.
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
    """An exchange under way: shards that were asked for and are not all answered.

    Attributes:
        number: of the worker's exchanges.
        asks: all of its parts.
        clock: the clock that the worker comes to with this push; 0 for a bare pull.
        minibatches: that the pushed numbers stand for.
        settings: of the optimizers' groups, by span.
        looks: whether a bare pull only looks, and no gradient will be computed at what it brings.
        marks: places of the data that the pushed numbers are made of.
        requested_at, answered_at: seconds on the service's clock.
        release: called when nobody needs the pushed values any more.
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
    release: Callable[[], None] = field(init=False, default_factory=lambda: _nothing)

    def __post_init__(self) -> None:
        self._open = {request.shard: request for request in self.requests}

    def request(self, shard: int) -> ShardRequest | None:
        """The part of `shard`, if its answer is still to come."""
        return self._open.get(shard)

    def answered(self, shard: int, version: int, delay: int, news: Any = None) -> None:
        """The answer is in its place."""
        request = self._open.pop(shard, None)
        if request is not None:
            request.version, request.delay, request.news = version, delay, news

    @property
    def counts_places(self) -> bool:
        """Whether the first shard is pushed to, with whose pushes the places of the data are counted."""
        return any(request.shard == LEDGER_SHARD and request.values is not None for request in self.requests)

    @property
    def waiting(self) -> list[ShardRequest]:
        """What is not answered."""
        return list(self._open.values())

    @property
    def done(self) -> bool:
        """Whether all is answered."""
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
        """Whether an owner refused a part."""
        return any(request.delay == REFUSED for request in self.requests)


class Service(Protocol):
    """What a worker needs of the cluster."""

    @property
    def leases(self) -> Leases:
        """The way to the ledger of the data."""

    def computed(self, step: int) -> None:
        """The computing of this worker's minibatch number `step` (the first is 0) is over."""

    def now(self) -> float:
        """Seconds on the clock by which this worker lives."""

    def exchange(self, pending: PendingExchange) -> None:
        """Send it on its way; where too many pushes are kept to be sent again, not before some need not be."""

    def exchange_later(self, pending: PendingExchange, after_s: float) -> Once:
        """Send it in so many seconds, or when what is returned is called before."""

    def done(self, pending: PendingExchange) -> bool:
        """Whether it is answered; raises what has broken the cluster."""

    def wait(self, pending: PendingExchange) -> None:
        """Return when it is answered; `PeerLostError` when nobody is left who could."""

    def taking(self) -> AbstractContextManager[object]:
        """Inside, nobody is given up: what was pulled and what is known of the ledger belong together."""

    def secure(self, rests: bool = True) -> None:
        """Return when no push of this worker can be lost with the one owner that has it.

        Args:
            rests: whether nobody is to wait for this worker's clock until its next push.
        """

    def begin_anew(self) -> None:
        """This worker's shards were put in the place of others, as by a checkpoint; before `settle`."""

    def settle(self) -> None:
        """Return when every worker has come here, with nothing under way."""

    def finish(self) -> None:
        """This worker has no more to push; return when that holds for all who take part."""

    def part(self) -> bool:
        """Return when everybody has the final model: nobody asks anything any more.

        False where somebody was lost meanwhile: the final model has to be pulled again.
        """

    def close(self) -> None:
        """Let go of everything at once."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
