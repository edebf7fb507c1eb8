# SPDX-License-Identifier: Apache-2.0
"""An owner's replicas at its heir: when a piece goes there, and whose pushes are known to be in it.

The heir is the next worker in rank order that lives. It answers each replica, and only then the pushes in it are safe:
their senders are told so with the answer to their next push, or at once where they asked for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from paceline.update.server.owner import Server

Send = Callable[[int, int, dict[str, Any], Tensor], None]
"""(piece, number of the replica, about, row)"""
Said = tuple[int, int, int]
"""(sender, piece, number of its push up to which all is safe)"""


class Replicas:
    """The replicas of one owner's pieces.

    Args:
        server: the pieces.
        every: pushes of one sender after which a piece is replicated.
        heir: gives who takes the pieces over; None where this worker is alone.
        send: sends a replica to the heir.
    """

    def __init__(self, server: Server, every: int, heir: Callable[[], int | None], send: Send) -> None:
        self._server, self._every, self._heir, self._send = server, every, heir, send
        self._lock = threading.RLock()
        self._number = 0
        self._sent: dict[int, dict[int, int]] = {}  # piece -> what was in its last replica
        self._flying: dict[int, tuple[int, int | None, dict[int, int]]] = {}  # piece -> number, heir, what is in it
        self._safe: dict[int, dict[int, int]] = {}
        self._wanted: dict[int, set[int]] = {}

    def pushed(self, piece: int) -> None:
        """A push was applied: replicate the piece if it is time; the pieces not all at the same push."""
        applied = self._server.pieces[piece].numbered.applied
        sent = self._sent.get(piece)
        every = self._every if sent is not None else 1 + piece % self._every
        before = sent or {}
        if any(number - before.get(sender, 0) >= every for sender, number in applied.copy().items()):
            self.replicate(piece)

    def replicate(self, piece: int) -> None:
        """Send a replica now, unless one is on its way."""
        with self._lock:
            heir = self._heir()
            if heir is None or piece in self._flying:
                return
            about, row = self._server.pieces[piece].snapshot()
            applied = {sender: number for sender, number in about["numbered"]["applied"]}
            self._number += 1
            self._sent[piece] = applied
            self._flying[piece] = self._number, heir, applied
            self._send(piece, self._number, about, row)

    def kept(self, heir: int, piece: int, number: int) -> list[Said]:
        """The heir has replica `number` of a piece; which senders are to be told what."""
        with self._lock:
            flying = self._flying.get(piece)
            if flying is None or flying[:2] != (number, heir):
                return []
            del self._flying[piece]
            self._safe[piece] = flying[2]
            return self._told(piece)

    def want(self, sender: int) -> list[Said]:
        """A sender waits until all of its pushes are safe; what it can be told at once."""
        with self._lock:
            found = []
            for piece in list(self._server.pieces):
                self._wanted.setdefault(piece, set()).add(sender)
                found += self._told(piece)
            return found

    def _told(self, piece: int) -> list[Said]:
        """Who waits for this piece, and what is safe of it; replicate again where that is not all."""
        applied, found, again = self._server.pieces[piece].numbered.applied, [], False
        for sender in sorted(self._wanted.get(piece, ())):
            safe = self.safe(piece, sender)
            found.append((sender, piece, safe))
            if safe >= applied.get(sender, 0):
                self._wanted[piece].discard(sender)
            else:
                again = True
        if again:
            self.replicate(piece)
        return found

    def safe(self, piece: int, sender: int) -> int:
        """The number of the sender's last push that the heir has, too; of the last one where nobody else lives."""
        if self._heir() is None:
            return self._server.pieces[piece].numbered.applied.get(sender, 0)
        return self._safe.get(piece, {}).get(sender, 0)

    def renew(self, pieces: Iterable[int]) -> None:
        """Nobody has a replica of these pieces: send one at once."""
        with self._lock:
            for piece in pieces:
                self._flying.pop(piece, None)
                self._safe.pop(piece, None)
                self._sent.pop(piece, None)
                self.replicate(piece)
