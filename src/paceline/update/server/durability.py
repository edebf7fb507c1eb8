# SPDX-License-Identifier: Apache-2.0
"""No push is lost with one owner: owners replicate shards, and senders keep pushes until a replica holds them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import PeerLostError
from paceline.update.server.context import ServiceContext
from paceline.update.server.frames import FrameKind
from paceline.update.server.membership import LOOK_EVERY_S
from paceline.update.server.peers import Peers
from paceline.update.server.protocol import PendingExchange, ShardRequest
from paceline.update.server.replication import Replicas, SafePush
from paceline.update.server.unreplicated_pushes import MORE, UnreplicatedPushes, interval


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
