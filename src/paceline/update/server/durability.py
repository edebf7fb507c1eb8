# SPDX-License-Identifier: Apache-2.0
"""How no push is lost with one owner: owners replicate, senders keep until then, and neither waits but at the end."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.errors import PeerLostError
from paceline.update.server.membership import LOOK_EVERY_S
from paceline.update.server.peer import REPLICA, SAFE, SECURE
from paceline.update.server.protocol import Ask, Ticket
from paceline.update.server.replication import Replicas, Said
from paceline.update.server.unreplicated_pushes import MORE, Kept, interval

if TYPE_CHECKING:
    from paceline.update.server.socket_service import ThreadedService


class Safekeeping:
    """What a worker keeps of its own pushes, and what it tells others of theirs.

    Args:
        service: the connection to the others.
        owners: piece -> rank.
        timeout_s: deadline of every wait for another worker, seconds.
    """

    def __init__(self, service: ThreadedService, owners: dict[int, int], timeout_s: float) -> None:
        self._service, self._timeout_s = service, timeout_s
        self._members, server = service.members, service.server
        self._interval = interval(server.push_bytes)
        self._kept = Kept()
        self._replicas = Replicas(server, self._interval, lambda: self._members.heir, self._send_replica)
        for piece, owner in owners.items():
            if self._members.successor(owner) == self._members.rank != owner:
                server.begin_replica(piece)

    # -- as an owner --------------------------------------------------------------------------------

    def applied(self, piece: int) -> None:
        """A push was applied: now and then a piece goes to the neighbour who would take it over."""
        self._replicas.pushed(piece)

    def _send_replica(self, piece: int, number: int, about: dict[str, Any], row: Tensor) -> None:
        heir = self._members.heir
        if heir is not None:
            self._service.lines[heir].say(REPLICA, (piece, number), row, about)

    def replica_kept(self, heir: int, piece: int, number: int) -> None:
        """The heir has a replica."""
        self._tell(self._replicas.kept(heir, piece, number))

    def wanted(self, sender: int) -> None:
        """A sender waits until all of its pushes are safe."""
        self._tell(self._replicas.want(sender))

    def up_to(self, piece: int, sender: int) -> int:
        """The number of the sender's last push to a piece that is safe."""
        return self._replicas.safe(piece, sender)

    def renew(self, pieces: Iterable[int]) -> None:
        """The replicas of these pieces are gone, or of no use any more."""
        self._replicas.renew(pieces)

    def _tell(self, said: list[Said]) -> None:
        by_sender: dict[int, list[tuple[int, int]]] = {}
        for sender, piece, number in said:
            by_sender.setdefault(sender, []).append((piece, number))
        for sender, safe in by_sender.items():
            if sender == self._members.rank:
                self.safe(sender, safe)
            elif sender not in self._members.lost:
                self._service.lines[sender].say(SAFE, (), note=safe)

    # -- as a sender --------------------------------------------------------------------------------

    @property
    def marks(self) -> list[Any]:
        """Places of the data that are pushed, and not yet in every piece for good."""
        return self._kept.marks

    def shared_by(self, streams: int) -> None:
        """So many streams push what they made of the same places."""
        self._kept.streams = streams

    def keep(self, ticket: Ticket) -> None:
        """Keep a push that is about to be sent; wait where too many are kept.

        Under a bound nobody waits here: others would wait for this worker, and it is at most the bound ahead of them.
        """
        if not self._service.desk.bounded:
            self._wait(self._kept.streams * (self._interval + MORE) - 1)
        with self._service.changed:
            self._kept.add(ticket)

    def safe(self, owner: int, said: Iterable[Sequence[int]]) -> None:
        """What `owner` says of this worker's pushes: (piece, number of the push up to which all is safe)."""
        with self._service.changed:
            before = len(self._kept)
            for piece, number in said:
                if self._members.owners[piece] == owner:
                    self._kept.safe(piece, number)
            self._service.desk.done(self._kept.done())
            if len(self._kept) < before or not self._kept.pieces:
                self._service.changed.notify_all()

    def again(self, pieces: Container[int], asked: Container[tuple[int, int]]) -> list[tuple[Ticket, Ask]]:
        """What the new owner of pieces is to be sent; values come back for what is `asked`, (exchange, piece) pairs."""
        found = []
        for ticket, ask in self._kept.again(pieces):
            found.append((ticket, ask if (ticket.number, ask.piece) in asked else replace(ask, out=None)))
        return found

    def secure(self) -> None:
        """Wait until all that this worker has pushed is with its owners and with their heirs."""
        self._wait(0)
        with self._service.changed:
            self._service.desk.done(self._kept.done(all_pushed=True))

    def _wait(self, most: int) -> None:
        """Wait until at most so many pushes are kept, and hurry the owners."""
        if len(self._kept) <= most:
            return
        end = time.monotonic() + 2 * self._timeout_s  # owners that do not answer are given up before that
        asked = 0.0
        while True:
            self._service.check()
            with self._service.changed:
                owners = sorted({self._members.owners[piece] for piece in self._kept.pieces})
                if len(self._kept) <= most or not owners:
                    return
                if time.monotonic() - asked > LOOK_EVERY_S:  # again: an owner may have been lost meanwhile
                    asked = time.monotonic()
                    self._hurry(owners)
                    continue
            self._service.pause(LOOK_EVERY_S)
            if time.monotonic() > end:
                raise PeerLostError(
                    self._service.sign(
                        f"pushes to {self._service.names(owners)} were not replicated within {2 * self._timeout_s:g} "
                        "s; look for a slow link between them and their neighbours, or give a longer timeout_s"
                    )
                )

    def _hurry(self, owners: list[int]) -> None:
        for owner in owners:
            if owner == self._members.rank:
                self.wanted(owner)
            else:
                self._service.lines[owner].say(SECURE, ())
