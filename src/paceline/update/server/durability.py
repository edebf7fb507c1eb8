# SPDX-License-Identifier: Apache-2.0
"""How no push is lost with one owner: owners replicate, senders keep until then, and neither waits but at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

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
    """What a worker keeps of its own pushes, and what it tells other workers of theirs.

    Args:
        context: of the service.
        peers: the connections.
        bounded: whether other workers wait for this worker's clock.
        done: called with places of the data that every shard has for good.
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
        """A push was applied: now and then a shard goes to the neighbour who would take it over."""
        self._replicas.pushed(shard)

    def _send_replica(self, shard: int, number: int, about: dict[str, Any], row: Tensor) -> None:
        successor = self._members.own_successor
        if successor is not None:
            self._peers[successor].say(FrameKind.REPLICA, (shard, number), row, about)

    def replica_kept(self, successor: int, shard: int, number: int) -> None:
        """The successor has a replica."""
        self._tell(self._replicas.kept(successor, shard, number))

    def wanted(self, sender: int) -> None:
        """A sender waits until all of its pushes are safe."""
        self._tell(self._replicas.want(sender))

    def up_to(self, shard: int, sender: int) -> int:
        """The number of the sender's last push to a shard that is safe."""
        return self._replicas.safe(shard, sender)

    def renew(self, shards: Iterable[int]) -> None:
        """The replicas of these shards are gone, or of no use any more."""
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
        """Places of the data that are pushed, and not yet in every shard for good."""
        return self._kept.marks

    def shared_by(self, clients: int) -> None:
        """So many clients push what they made of the same places."""
        self._kept.clients = clients

    def keep(self, pending: PendingExchange) -> None:
        """Keep a push that is about to be sent; wait where too many are kept.

        Under a bound nobody waits here: others would wait for this worker, and it is at most the bound ahead of them.
        """
        if not self._bounded:
            self._wait(self._kept.clients * (self._interval + MORE) - 1)
        with self._context.changed:
            self._kept.add(pending)

    def safe(self, owner: int, said: Iterable[Sequence[int]]) -> None:
        """What `owner` says of this worker's pushes: (shard, number of the push up to which all is safe)."""
        with self._context.changed:
            before = len(self._kept)
            for shard, number in said:
                if self._members.owners[shard] == owner:
                    self._kept.safe(shard, number)
            self._done(self._kept.done())
            if len(self._kept) < before or not self._kept.shards:
                self._context.changed.notify_all()

    def again(
        self, shards: Container[int], asked: Container[tuple[int, int]]
    ) -> list[tuple[PendingExchange, ShardRequest]]:
        """What the new owner of shards is to be sent; values come back for what is `asked`, (exchange, shard) pairs."""
        found = []
        for pending, request in self._kept.again(shards):
            found.append((pending, request if (pending.number, request.shard) in asked else replace(request, out=None)))
        return found

    def secure(self) -> None:
        """Wait until all that this worker has pushed is with its owners and with their successors."""
        self._wait(0)
        with self._context.changed:
            self._done(self._kept.done(all_pushed=True))

    def _wait(self, most: int) -> None:
        """Wait until at most so many pushes are kept, and hurry the owners."""
        if len(self._kept) <= most:
            return
        end = time.monotonic() + 2 * self._context.timeout_s  # owners that do not answer are given up before that
        asked = 0.0
        while True:
            self._context.check()
            with self._context.changed:
                owners = sorted({self._members.owners[shard] for shard in self._kept.shards})
                if len(self._kept) <= most or not owners:
                    return
                if time.monotonic() - asked > LOOK_EVERY_S:  # again: an owner may have been lost meanwhile
                    asked = time.monotonic()
                    self._hurry(owners)
                    continue
            self._peers.pause(LOOK_EVERY_S)
            if time.monotonic() > end:
                raise PeerLostError(
                    self._context.sign(
                        f"pushes to {self._context.names(owners)} were not replicated within "
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
