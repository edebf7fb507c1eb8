# SPDX-License-Identifier: Apache-2.0
"""No push is lost with one owner.

    owner           sends its neighbour, the next worker in rank order, a replica of a shard after every `interval`
                    pushes of one sender; the neighbour acknowledges it (KEPT), and the pushes in it are *safe*
    sender          learns what is safe with the answer to its next push, or at once where it asks for that (SECURE,
                    SAFE); it keeps its pushes until then, and waits when it keeps too many
    owner is lost   its neighbour goes on from the replica, and senders send it again what the replica may lack

There is one replica. Once a shard's owner or its neighbour is lost, the other one has the shard alone: pushes to it are
safe when they are applied, and the run ends if that worker is lost as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark
from paceline.update.server.membership import LOOK_EVERY_S, ServiceContext
from paceline.update.server.peer import Peers
from paceline.update.server.protocol import FrameKind, PendingExchange, ShardRequest
from paceline.update.server.shard import ShardServer

KEPT_BYTES = 1 << 30
"""Memory of the pushes that a worker keeps, where they are large."""
MOST, LEAST = 16, 2
"""Pushes of a sender between two replicas of a shard."""
MORE = 4
"""Further pushes that are kept while a replica is on its way."""


def interval(push_bytes: int) -> int:
    """Pushes of one sender after which a shard is replicated: 2 to 16, so that a sender keeps about 1 GiB of them."""
    return max(LEAST, min(MOST, KEPT_BYTES // max(1, push_bytes)))


class SafePush(NamedTuple):
    """All pushes of `sender` to `shard` up to `number` are safe, `alone`: if its neighbour is lost."""

    sender: int
    shard: int
    number: int
    alone: int


class Replicas:
    """The replicas of one owner's shards."""

    def __init__(
        self,
        server: ShardServer,
        every: int,  # pushes of one sender after which a shard is replicated
        keeper: Callable[[int], int | None],  # shard -> the worker that keeps its replica; None where there is none
        send: Callable[[int, int, dict[str, Any], Tensor], None],  # shard, number of the replica, about, row
        tell: Callable[[list[SafePush]], None],  # tells senders; it waits for locks, and none is held here then
    ) -> None:
        self._server, self._every, self._keeper, self._send, self._tell = server, every, keeper, send, tell
        self._lock = runtime.RLock()
        self._number = 0
        self._sent: dict[int, dict[int, int]] = {}  # shard -> each sender's last push in its last replica
        self._in_flight: dict[int, int] = {}  # shard -> number of the replica that is on its way
        self._safe: dict[int, dict[int, int]] = {}  # shard -> each sender's last push in its last kept replica
        self._wanted: dict[int, set[int]] = {}  # shard -> senders that wait until their pushes are safe

    def pushed(self, shard: int) -> None:
        """Replicate a shard if it is due after a push; different shards at different pushes."""
        applied, sent = self._server.shards[shard].numbered.applied, self._sent.get(shard)
        every = self._every if sent is not None else 1 + shard % self._every
        before = sent or {}
        if any(number - before.get(sender, 0) >= every for sender, number in applied.copy().items()):
            self._replicate(shard)

    def _replicate(self, shard: int) -> None:
        """Send a replica now, unless one is on its way."""
        with self._lock:
            if self._keeper(shard) is None or shard in self._in_flight:
                return
            about, row = self._server.shards[shard].snapshot()
            self._number += 1
            self._sent[shard] = {sender: number for sender, number in about["numbered"]["applied"]}
            self._in_flight[shard] = self._number
            self._send(shard, self._number, about, row)

    def kept(self, shard: int, number: int) -> None:
        """Note that the keeper has replica `number` of a shard, and tell the senders that wait for that."""
        with self._lock:
            if self._in_flight.get(shard) != number:
                return
            del self._in_flight[shard]
            self._safe[shard] = self._sent[shard]
            news = self._news(shard)
        self._tell(news)

    def want(self, sender: int) -> None:
        """Tell a sender as soon as all of its pushes are safe."""
        news: list[SafePush] = []
        with self._lock:
            for shard in list(self._server.shards):
                self._wanted.setdefault(shard, set()).add(sender)
                news += self._news(shard)
        self._tell(news)

    def _news(self, shard: int) -> list[SafePush]:
        """What to tell the senders that wait for this shard; replicate again where a push is not safe."""
        applied, waiting = self._server.shards[shard].numbered.applied, self._wanted.get(shard, set())
        news = [SafePush(sender, shard, *self.safe(shard, sender)) for sender in sorted(waiting)]
        waiting -= {one.sender for one in news if one.number >= applied.get(one.sender, 0)}
        if waiting:
            self._replicate(shard)
        return news

    def safe(self, shard: int, sender: int) -> tuple[int, int]:
        """The number of the sender's last push that is safe, and whether that is because there is no replica."""
        if self._keeper(shard) is None:
            return self._server.shards[shard].numbered.applied.get(sender, 0), 1
        return self._safe.get(shard, {}).get(sender, 0), 0

    def renew(self) -> None:
        """Send replicas of all shards at once: a checkpoint has replaced them."""
        with self._lock:
            for shard in self._server.shards:
                for of_former in (self._in_flight, self._safe, self._sent):
                    of_former.pop(shard, None)
                self._replicate(shard)


class _Entry:
    """A push, and the shards in which it may not be safe."""

    def __init__(self, pending: PendingExchange) -> None:
        self.pending = pending
        self.open = {request.shard: request for request in pending.requests.values() if request.values is not None}


class UnsafePushes:
    """The pushes that a worker keeps, because it may have to send them again; not thread-safe."""

    def __init__(self, clients: int = 1) -> None:
        self.clients = clients  # push what they made of the same samples; the first one pushes to the first shard
        self._order: deque[_Entry] = deque()
        self._by_shard: dict[int, deque[_Entry]] = {}
        self._last: list[Mark] = []  # of the newest safe push, whose samples other clients may still push

    def __len__(self) -> int:
        return len(self._order)

    def add(self, pending: PendingExchange) -> None:
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
        """The sample ranges that have become safe in every shard since the last call; `all_pushed`: whether all clients
        have pushed what they made of them."""
        marks: list[Mark] = []
        while self._order and not self._order[0].open:
            pending = self._order.popleft().pending
            if pending.counts_samples:
                marks += self._last
                self._last = list(pending.marks)
        if self._last and (self.clients == 1 or (all_pushed and not self._order)):
            marks += self._last
            self._last = []
        return marks

    @property
    def shards(self) -> list[int]:
        """The shards in which a push of this worker is not safe."""
        return [shard for shard, waiting in self._by_shard.items() if waiting]

    def again(
        self, shards: Container[int], asked: Container[tuple[int, int]]
    ) -> Iterator[tuple[PendingExchange, ShardRequest]]:
        """The requests to send to the new owner of `shards`, in order; `asked`: (exchange, shard) pairs that await
        values."""
        for entry in self._order:
            for shard, request in entry.open.items():
                if shard in shards:
                    awaited = (entry.pending.number, shard) in asked
                    yield entry.pending, request if awaited else replace(request, out=None)

    @property
    def marks(self) -> list[Mark]:
        """The sample ranges that are pushed, and not yet safe in every shard."""
        pushed = (entry.pending for entry in self._order if entry.pending.counts_samples)
        return [*self._last, *(mark for pending in pushed for mark in pending.marks)]


class Durability:
    """Replicates this worker's shards, and keeps its pushes until they are safe."""

    def __init__(
        self,
        context: ServiceContext,
        peers: Peers,
        bounded: bool,  # whether other workers wait for this worker's clock
        clients: int,  # how many push what they made of the same samples
        done: Callable[[list[Mark]], None],  # called with sample ranges that every shard holds for good
    ) -> None:
        self._context, self._peers, self._bounded, self._done = context, peers, bounded, done
        self._members, server = context.membership, context.server
        self._interval, self.kept = interval(server.push_bytes), UnsafePushes(clients)
        keeper = self._members.replica_keeper
        self.replicas = Replicas(server, self._interval, keeper, self._send_replica, self._tell)
        for shard in self._members.owners:
            if keeper(shard) == self._members.rank:
                server.begin_replica(shard)

    # -- as an owner --------------------------------------------------------------------------------

    def _send_replica(self, shard: int, number: int, about: dict[str, Any], row: Tensor) -> None:
        keeper = self._members.replica_keeper(shard)
        if keeper is not None:
            self._peers[keeper].say(FrameKind.REPLICA, (shard, number), row, about)

    def _tell(self, news: list[SafePush]) -> None:
        for sender in dict.fromkeys(one.sender for one in news):
            safe = [(one.shard, one.number, one.alone) for one in news if one.sender == sender]
            if sender == self._members.rank:
                self.safe(sender, safe)
            elif sender not in self._members.lost:
                self._peers[sender].say(FrameKind.SAFE, (), note=safe)

    # -- as a sender --------------------------------------------------------------------------------

    def keep(self, pending: PendingExchange) -> None:
        """Keep a push that is about to be sent; wait where too many are kept.

        Under a bound on staleness there is no wait: other workers would wait for this one, which is at most the bound
        ahead of them.
        """
        if not self._bounded:
            self._wait(self.kept.clients * (self._interval + MORE) - 1)
        with self._context.changed:
            self.kept.add(pending)

    def safe(self, owner: int, pushes: Iterable[Sequence[int]]) -> None:
        """Note which of this worker's pushes `owner` reports as safe: rows (shard, number of the last one, alone).

        An owner that has lost its neighbour may die before this worker learns of that, which would then turn to the
        neighbour: so that an owner is alone counts only when this worker knows it.
        """
        with self._context.changed:
            before, is_news = len(self.kept), False
            for shard, number, alone in pushes:
                known = not alone or self._members.replica_keeper(shard) is None
                if known and self._members.owners[shard] == owner:
                    is_news |= self.kept.safe(shard, number)
            if not is_news:
                return
            self._done(self.kept.done())
            if len(self.kept) < before or not self.kept.shards:
                self._context.changed.notify_all()

    def secure(self) -> None:
        """Wait until all pushes of this worker are safe."""
        self._wait(0)
        with self._context.changed:
            self._done(self.kept.done(all_pushed=True))

    def _wait(self, most: int) -> None:
        """Wait until at most so many pushes are kept, and ask the owners to replicate."""
        if len(self.kept) <= most:
            return
        end = runtime.monotonic() + 2 * self._context.timeout_s  # owners that do not answer are lost before that
        asked = 0.0
        while True:
            self._context.check()
            with self._context.changed:
                owners = sorted({self._members.owners[shard] for shard in self.kept.shards})
                if len(self.kept) <= most or not owners:
                    return
                if runtime.monotonic() - asked > LOOK_EVERY_S:  # repeatedly: an owner may have been lost
                    asked = runtime.monotonic()
                    for owner in owners:
                        if owner == self._members.rank:
                            self.replicas.want(owner)
                        else:
                            self._peers[owner].say(FrameKind.SECURE, ())
                    continue
            self._peers.pause(LOOK_EVERY_S)
            if runtime.monotonic() > end:
                raise self._context.lost_error(
                    f"pushes to {self._context.world.names(owners)} were not replicated within "
                    f"{2 * self._context.timeout_s:g} s; look for a slow link between them and "
                    "their neighbours, or give a longer timeout_s"
                )
