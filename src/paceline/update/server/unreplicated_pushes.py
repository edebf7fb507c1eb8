# SPDX-License-Identifier: Apache-2.0
"""What a worker has pushed and may have to push again: each push, until a replica of every shard holds it.

What an owner's successor has no replica of is lost with the owner. The senders send it again, to the successor. What
they keep is bounded: owners replicate a shard as soon as one sender has `interval` pushes in it that no replica holds,
and a sender with `MORE` pushes beyond that waits before its next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from paceline.data.ledger.epoch_ledger import Mark
from paceline.update.server.protocol import PendingExchange, ShardRequest

KEPT_BYTES = 1 << 30
"""Of pushes that a worker keeps, where they are large."""
MOST, LEAST = 16, 2
"""Pushes of a sender between two replicas of a shard."""
MORE = 4
"""Pushes beyond these that are kept while a replica is on its way."""


def interval(push_bytes: int) -> int:
    """Pushes of one sender after which a shard is replicated: 2 to 16, so that a sender keeps about 1 GiB of them."""
    return max(LEAST, min(MOST, KEPT_BYTES // max(1, push_bytes)))


class _Entry:
    """A push, and the shards of which no replica is known to hold it."""

    def __init__(self, pending: PendingExchange) -> None:
        self.pending = pending
        self.open = {request.shard: request for request in pending.requests if request.values is not None}


class UnreplicatedPushes:
    """The pushes that a worker keeps. Nothing here waits or sends, or is safe between threads.

    Attributes:
        clients: of numbered pushes, that share the places of the data; the first of them pushes to the first shard.
    """

    def __init__(self) -> None:
        self.clients = 1
        self._order: deque[_Entry] = deque()
        self._by_shard: dict[int, deque[_Entry]] = {}
        self._last: list[Mark] = []  # of the newest push whose samples other clients may have pushed after it

    def __len__(self) -> int:
        return len(self._order)

    def add(self, pending: PendingExchange) -> None:
        """Keep a push that is about to be sent."""
        entry = _Entry(pending)
        if entry.open:
            self._order.append(entry)
            for shard in entry.open:
                self._by_shard.setdefault(shard, deque()).append(entry)

    def safe(self, shard: int, number: int) -> None:
        """The owner and its successor have this worker's pushes to `shard` up to `number`."""
        waiting = self._by_shard.get(shard)
        while waiting and waiting[0].pending.clock <= number:
            entry = waiting.popleft()
            entry.open.pop(shard, None)
            if not entry.open:
                entry.pending.release()

    def done(self, all_pushed: bool = False) -> list[Mark]:
        """The places of the data that every shard has, for good, since the last call.

        Args:
            all_pushed: whether no client has more to push of the samples that were pushed.
        """
        found: list[Mark] = []
        while self._order and not self._order[0].open:
            pending = self._order.popleft().pending
            if pending.counts_places:
                found += self._last
                self._last = list(pending.marks)
        if self._last and (self.clients == 1 or (all_pushed and not self._order)):
            found += self._last
            self._last = []
        return found

    @property
    def shards(self) -> list[int]:
        """Those in which something of this worker is not safe."""
        return [shard for shard, waiting in self._by_shard.items() if waiting]

    def again(self, shards: Container[int]) -> Iterable[tuple[PendingExchange, ShardRequest]]:
        """What is to be sent again to the new owner of `shards`, in order."""
        for entry in self._order:
            for shard, request in entry.open.items():
                if shard in shards:
                    yield entry.pending, request

    @property
    def marks(self) -> list[Mark]:
        """The places of the data that are pushed, and not yet in every shard for good."""
        return [
            *self._last,
            *(mark for entry in self._order if entry.pending.counts_places for mark in entry.pending.marks),
        ]
