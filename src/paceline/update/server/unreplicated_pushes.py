# SPDX-License-Identifier: Apache-2.0
"""What a worker has pushed and may have to push again: each push, until a replica of every piece holds it.

An owner that dies takes with it what its heir has no replica of. The senders send that again, to the heir. What they
keep is bounded: owners replicate a piece as soon as one sender has `interval` pushes in it that no replica holds, and a
sender with `MORE` pushes beyond that waits before its next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from paceline.data.ledger.epoch_ledger import Mark
from paceline.update.server.protocol import Ask, Ticket

KEPT_BYTES = 1 << 30
"""Of pushes that a worker keeps, where they are large."""
MOST, LEAST = 16, 2
"""Pushes of a sender between two replicas of a piece."""
MORE = 4
"""Pushes beyond these that are kept while a replica is on its way."""


def interval(push_bytes: int) -> int:
    """Pushes of one sender after which a piece is replicated: 2 to 16, so that a sender keeps about 1 GiB of them."""
    return max(LEAST, min(MOST, KEPT_BYTES // max(1, push_bytes)))


class _Entry:
    """A push, and the pieces of which no replica is known to hold it."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.open = {ask.piece: ask for ask in ticket.asks if ask.values is not None}


class Kept:
    """The pushes that a worker keeps. Nothing here waits or sends, or is safe between threads.

    Attributes:
        streams: of numbered pushes, that share the places of the data; the first of them pushes to the first piece.
    """

    def __init__(self) -> None:
        self.streams = 1
        self._order: deque[_Entry] = deque()
        self._by_piece: dict[int, deque[_Entry]] = {}
        self._last: list[Mark] = []  # of the newest push whose samples other streams may have pushed after it

    def __len__(self) -> int:
        return len(self._order)

    def add(self, ticket: Ticket) -> None:
        """Keep a push that is about to be sent."""
        entry = _Entry(ticket)
        if entry.open:
            self._order.append(entry)
            for piece in entry.open:
                self._by_piece.setdefault(piece, deque()).append(entry)

    def safe(self, piece: int, number: int) -> None:
        """The owner and its heir have this worker's pushes to `piece` up to `number`."""
        waiting = self._by_piece.get(piece)
        while waiting and waiting[0].ticket.clock <= number:
            entry = waiting.popleft()
            entry.open.pop(piece, None)
            if not entry.open:
                entry.ticket.release()

    def done(self, all_pushed: bool = False) -> list[Mark]:
        """The places of the data that every piece has, for good, since the last call.

        Args:
            all_pushed: whether no stream has more to push of the samples that were pushed.
        """
        found: list[Mark] = []
        while self._order and not self._order[0].open:
            ticket = self._order.popleft().ticket
            if ticket.keeping:
                found += self._last
                self._last = list(ticket.marks)
        if self._last and (self.streams == 1 or (all_pushed and not self._order)):
            found += self._last
            self._last = []
        return found

    @property
    def pieces(self) -> list[int]:
        """Those in which something of this worker is not safe."""
        return [piece for piece, waiting in self._by_piece.items() if waiting]

    def again(self, pieces: Container[int]) -> Iterable[tuple[Ticket, Ask]]:
        """What is to be sent again to the new owner of `pieces`, in order."""
        for entry in self._order:
            for piece, ask in entry.open.items():
                if piece in pieces:
                    yield entry.ticket, ask

    @property
    def marks(self) -> list[Mark]:
        """The places of the data that are pushed, and not yet in every piece for good."""
        return [*self._last, *(mark for entry in self._order if entry.ticket.keeping for mark in entry.ticket.marks)]
