# SPDX-License-Identifier: Apache-2.0
"""No push is lost with one owner: owners replicate shards, and senders keep pushes until a replica holds them.

The successor is the next live worker in rank order. It acknowledges each replica, and only then the pushes in it are
safe: their senders learn so with the answer to their next push, or at once where they asked for it.

Pushes that no replica holds are lost with the owner; their senders send them to its successor again. Memory for them is
bounded: owners replicate a shard as soon as one sender has `interval` pushes in it that no replica holds, and a sender
with `MORE` pushes beyond that waits before its next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import PeerLostError
from paceline.update.server.context import ServiceContext
from paceline.update.server.frames import FrameKind
from paceline.update.server.membership import LOOK_EVERY_S
from paceline.update.server.owner import ShardServer
from paceline.update.server.peer import Peers
from paceline.update.server.protocol import PendingExchange, ShardRequest

Send = Callable[[int, int, dict[str, Any], Tensor], None]
"""(shard, number of the replica, about, row)"""


class SafePush(NamedTuple):
    """The owner and its successor have all pushes of `sender` to `shard` up to `number`."""

    sender: int
    shard: int
    number: int


class InFlight(NamedTuple):
    """A replica on its way: its number, its receiver, and the number of each sender's last push in it."""

    number: int
    successor: int
    applied: dict[int, int]


class Replicas:
    """The replicas of one owner's shards.

    Args:
        server: the shards.
        every: pushes of one sender after which a shard is replicated.
        successor: gives the worker that would take over the shards; None where this worker is alone.
        send: sends a replica to the successor.
    """

    def __init__(self, server: ShardServer, every: int, successor: Callable[[], int | None], send: Send) -> None:
        self._server, self._every, self._successor, self._send = server, every, successor, send
        self._lock = runtime.RLock()
        self._number = 0
        self._sent: dict[int, dict[int, int]] = {}  # shard -> what was in its last replica
        self._in_flight: dict[int, InFlight] = {}  # by shard
        self._safe: dict[int, dict[int, int]] = {}
        self._wanted: dict[int, set[int]] = {}

    def pushed(self, shard: int) -> None:
        """Replicate a shard if it is due after a push; different shards at different pushes."""
        applied = self._server.shards[shard].numbered.applied
        sent = self._sent.get(shard)
        every = self._every if sent is not None else 1 + shard % self._every
        before = sent or {}
        if any(number - before.get(sender, 0) >= every for sender, number in applied.copy().items()):
            self.replicate(shard)

    def replicate(self, shard: int) -> None:
        """Send a replica now, unless one is on its way."""
        with self._lock:
            successor = self._successor()
            if successor is None or shard in self._in_flight:
                return
            about, row = self._server.shards[shard].snapshot()
            applied = {sender: number for sender, number in about["numbered"]["applied"]}
            self._number += 1
            self._sent[shard] = applied
            self._in_flight[shard] = InFlight(self._number, successor, applied)
            self._send(shard, self._number, about, row)

    def kept(self, successor: int, shard: int, number: int) -> list[SafePush]:
        """Note that the successor has replica `number` of a shard; what to tell which senders."""
        with self._lock:
            in_flight = self._in_flight.get(shard)
            if in_flight is None or in_flight[:2] != (number, successor):
                return []
            del self._in_flight[shard]
            self._safe[shard] = in_flight.applied
            return self._told(shard)

    def want(self, sender: int) -> list[SafePush]:
        """Note that a sender waits until its pushes are safe; what to tell it at once."""
        with self._lock:
            found = []
            for shard in list(self._server.shards):
                self._wanted.setdefault(shard, set()).add(sender)
                found += self._told(shard)
            return found

    def _told(self, shard: int) -> list[SafePush]:
        """What to tell the senders that wait for this shard; replicate again where a push is not safe."""
        applied, again = self._server.shards[shard].numbered.applied, False
        found: list[SafePush] = []
        for sender in sorted(self._wanted.get(shard, ())):
            safe = self.safe(shard, sender)
            found.append(SafePush(sender, shard, safe))
            if safe >= applied.get(sender, 0):
                self._wanted[shard].discard(sender)
            else:
                again = True
        if again:
            self.replicate(shard)
        return found

    def safe(self, shard: int, sender: int) -> int:
        """The number of the sender's last push that the successor has; of its last push where there is no successor."""
        if self._successor() is None:
            return self._server.shards[shard].numbered.applied.get(sender, 0)
        return self._safe.get(shard, {}).get(sender, 0)

    def renew(self, shards: Iterable[int]) -> None:
        """Send replicas of these shards at once: the former ones are lost or out of date."""
        with self._lock:
            for shard in shards:
                self._in_flight.pop(shard, None)
                self._safe.pop(shard, None)
                self._sent.pop(shard, None)
                self.replicate(shard)


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


class Durability:
    """Replicates this worker's shards, and keeps its pushes until they are safe.

    Args:
        context: of the service.
        peers: the connections.
        bounded: whether other workers wait for this worker's clock.
        done: called with sample ranges that every shard holds for good.
    """

    def __init__(
        self, context: ServiceContext, peers: Peers, bounded: bool, done: Callable[[list[Mark]], None]
    ) -> None:
        self._context, self._peers, self._bounded, self._done = context, peers, bounded, done
        self._members, server = context.membership, context.server
        self._interval = interval(server.push_bytes)
        self._kept = UnreplicatedPushes()
        self._replicas = Replicas(server, self._interval, lambda: self._members.own_successor, self._send_replica)
        for shard, owner in self._members.owners.items():
            if self._members.successor(owner) == self._members.rank != owner:
                server.begin_replica(shard)

    # -- as an owner --------------------------------------------------------------------------------

    def applied(self, shard: int) -> None:
        """Replicate the shard if it is due, after a push was applied."""
        self._replicas.pushed(shard)

    def _send_replica(self, shard: int, number: int, about: dict[str, Any], row: Tensor) -> None:
        successor = self._members.own_successor
        if successor is not None:
            self._peers[successor].say(FrameKind.REPLICA, (shard, number), row, about)

    def replica_kept(self, successor: int, shard: int, number: int) -> None:
        """Tell senders which pushes are safe, after the successor has received a replica."""
        self._tell(self._replicas.kept(successor, shard, number))

    def wanted(self, sender: int) -> None:
        """Tell a sender as soon as all of its pushes are safe."""
        self._tell(self._replicas.want(sender))

    def up_to(self, shard: int, sender: int) -> int:
        """The number of the sender's last push to a shard that is safe."""
        return self._replicas.safe(shard, sender)

    def renew(self, shards: Iterable[int]) -> None:
        """Replicate these shards anew: their replicas are lost or out of date."""
        self._replicas.renew(shards)

    def _tell(self, said: list[SafePush]) -> None:
        by_sender: dict[int, list[tuple[int, int]]] = {}
        for sender, shard, number in said:
            by_sender.setdefault(sender, []).append((shard, number))
        for sender, safe in by_sender.items():
            if sender == self._members.rank:
                self.safe(sender, safe)
            elif sender not in self._members.lost:
                self._peers[sender].say(FrameKind.SAFE, (), note=safe)

    # -- as a sender --------------------------------------------------------------------------------

    @property
    def marks(self) -> list[Any]:
        """Sample ranges that are pushed, and not yet in every shard for good."""
        return self._kept.marks

    def shared_by(self, clients: int) -> None:
        """Expect so many clients to push what they made of the same samples."""
        self._kept.clients = clients

    def keep(self, pending: PendingExchange) -> None:
        """Keep a push that is about to be sent; wait where too many are kept.

        Under a bound on staleness there is no wait: other workers would wait for this one, which is at most the bound
        ahead of them.
        """
        if not self._bounded:
            self._wait(self._kept.clients * (self._interval + MORE) - 1)
        with self._context.changed:
            self._kept.add(pending)

    def safe(self, owner: int, said: Iterable[Sequence[int]]) -> None:
        """Note which of this worker's pushes `owner` reports as safe: (shard, number of the last one) pairs."""
        with self._context.changed:
            before, is_news = len(self._kept), False
            for shard, number in said:
                if self._members.owners[shard] == owner:
                    is_news |= self._kept.safe(shard, number)
            if not is_news:
                return
            self._done(self._kept.done())
            if len(self._kept) < before or not self._kept.shards:
                self._context.changed.notify_all()

    def again(
        self, shards: Container[int], asked: Container[tuple[int, int]]
    ) -> list[tuple[PendingExchange, ShardRequest]]:
        """The requests to send to the new owner of shards; `asked`: (exchange, shard) pairs that await values."""
        return [
            (pending, request if (pending.number, request.shard) in asked else replace(request, out=None))
            for pending, request in self._kept.again(shards)
        ]

    def secure(self) -> None:
        """Wait until the owners and their successors have all pushes of this worker."""
        self._wait(0)
        with self._context.changed:
            self._done(self._kept.done(all_pushed=True))

    def _wait(self, most: int) -> None:
        """Wait until at most so many pushes are kept, and ask the owners to replicate."""
        if len(self._kept) <= most:
            return
        end = runtime.monotonic() + 2 * self._context.timeout_s  # owners that do not answer are lost before that
        asked = 0.0
        while True:
            self._context.check()
            with self._context.changed:
                owners = sorted({self._members.owners[shard] for shard in self._kept.shards})
                if len(self._kept) <= most or not owners:
                    return
                if runtime.monotonic() - asked > LOOK_EVERY_S:  # repeatedly: an owner may have been lost
                    asked = runtime.monotonic()
                    self._hurry(owners)
                    continue
            self._peers.pause(LOOK_EVERY_S)
            if runtime.monotonic() > end:
                world = self._context.world
                raise PeerLostError(
                    world.sign(
                        f"pushes to {world.names(owners)} were not replicated within "
                        f"{2 * self._context.timeout_s:g} s; look for a slow link between them and "
                        "their neighbours, or give a longer timeout_s"
                    )
                )

    def _hurry(self, owners: list[int]) -> None:
        for owner in owners:
            if owner == self._members.rank:
                self.wanted(owner)
            else:
                self._peers[owner].say(FrameKind.SECURE, ())
