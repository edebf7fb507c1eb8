# SPDX-License-Identifier: Apache-2.0
"""The pushes that a worker may have to send again: each push, until a replica of every shard holds it.

Pushes that no replica holds are lost with the owner; their senders send them to its successor again. Memory for them is
bounded: owners replicate a shard as soon as one sender has `interval` pushes in it that no replica holds, and a sender
with `MORE` pushes beyond that waits before its next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from paceline.data.ledger.epoch_ledger import Mark
from paceline.update.server.protocol import PendingExchange, ShardRequest

KEPT_BYTES = 1 << 30
"""Memory of the pushes that a worker keeps, where they are large."""
MOST, LEAST = 16, 2
"""Pushes of a sender between two replicas of a shard."""
MORE = 4
"""Further pushes that are kept while a replica is on its way."""


def interval(push_bytes: int) -> int:
    """Pushes of one sender after which a shard is replicated: 2 to 16, so that a sender keeps about 1 GiB of them."""
    return max(LEAST, min(MOST, KEPT_BYTES // max(1, push_bytes)))


class _Entry:
    """A push, and the shards whose replicas may not hold it."""

    def __init__(self, pending: PendingExchange) -> None:
        self.pending = pending
        self.open = {request.shard: request for request in pending.requests if request.values is not None}


class UnreplicatedPushes:
    """The pushes that a worker keeps; not thread-safe.

    Attributes:
        clients: how many clients push what they made of the same samples; the first one pushes to the first shard.
    """

    def __init__(self) -> None:
        self.clients = 1
        self._order: deque[_Entry] = deque()
        self._by_shard: dict[int, deque[_Entry]] = {}
        self._last: list[Mark] = []  # of the newest safe push, whose samples other clients may still push

    def __len__(self) -> int:
        return len(self._order)

    def add(self, pending: PendingExchange) -> None:
        """Keep a push that is about to be sent."""
        entry = _Entry(pending)
        if entry.open:
            self._order.append(entry)
            for shard in entry.open:
                self._by_shard.setdefault(shard, deque()).append(entry)

    def safe(self, shard: int, number: int) -> bool:
        """Note that the pushes to `shard` up to `number` are safe; whether that was unknown of one."""
        waiting, is_news = self._by_shard.get(shard), False
        while waiting and waiting[0].pending.clock <= number:
            entry = waiting.popleft()
            entry.open.pop(shard, None)
            is_news = True
            if not entry.open:
                entry.pending.release()
        return is_news

    def done(self, all_pushed: bool = False) -> list[Mark]:
        """The sample ranges that have become safe in every shard since the last call.

        Args:
            all_pushed: whether all clients have pushed what they made of these samples.
        """
        found: list[Mark] = []
        while self._order and not self._order[0].open:
            pending = self._order.popleft().pending
            if pending.counts_samples:
                found += self._last
                self._last = list(pending.marks)
        if self._last and (self.clients == 1 or (all_pushed and not self._order)):
            found += self._last
            self._last = []
        return found

    @property
    def shards(self) -> list[int]:
        """The shards in which a push of this worker is not safe."""
        return [shard for shard, waiting in self._by_shard.items() if waiting]

    def again(self, shards: Container[int]) -> Iterable[tuple[PendingExchange, ShardRequest]]:
        """The requests to send to the new owner of `shards`, in order."""
        for entry in self._order:
            for shard, request in entry.open.items():
                if shard in shards:
                    yield entry.pending, request

    @property
    def marks(self) -> list[Mark]:
        """The sample ranges that are pushed, and not yet in every shard for good."""
        return [
            *self._last,
            *(mark for entry in self._order if entry.pending.counts_samples for mark in entry.pending.marks),
        ]
