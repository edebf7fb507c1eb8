# SPDX-License-Identifier: Apache-2.0
"""The operations of a channel or subgroup, in their common order; and frames that arrive before their operation."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from paceline.communication.ring.wire import COLLECTIVE, EAGER, RECEIVING, WINDOW, Key, sequence_id
from paceline.errors import MismatchError

UNMATCHED_BYTES = 1 << 24
"""Most bytes of unmatched pieces kept from one worker."""
UNMATCHED_COST = 512
"""Bytes that each of them counts in addition to its body, for the objects that keep it."""
GRANTS = 1 << 16
"""Most unmatched grants kept from one worker."""


class Sequenced(Protocol):
    """An operation, as its sequence uses it."""

    key: Key
    progress: float


OperationT = TypeVar("OperationT", bound=Sequenced)


class OpSequence(Generic[OperationT]):
    """A channel or subgroup.

    Attributes:
        label: the same on all members, and of no other sequence.
        ranks: its members, as ranks of the whole connection.
        in_flight: collectives that have begun.
        deferred: collectives that begin when one of those completes.
        closed: no operation may be started any more.
    """

    def __init__(self, label: str, ranks: list[int]) -> None:
        self.label, self.ranks, self.id = label, ranks, sequence_id(label)
        self.in_flight: set[OperationT] = set()
        self.deferred: deque[OperationT] = deque()
        self.closed = False
        self._begun = 0
        self._counts: Counter[tuple[int, int]] = Counter()

    def next_key(self, role: int, peer: int) -> Key:
        """The key of the next operation of that role."""
        self._counts[role, peer] += 1
        return Key(self.id, self._counts[role, peer], role, peer)

    def full(self) -> bool:
        """Whether another collective has to wait."""
        return len(self.in_flight) >= WINDOW or bool(self.deferred)

    def begins(self, operation: OperationT) -> None:
        """The operation is no longer deferred."""
        if operation.key.role == COLLECTIVE:
            self.in_flight.add(operation)
            self._begun = operation.key.number

    def begun(self, role: int, peer: int) -> int:
        """The number of the last operation of that role that has begun."""
        return self._begun if role == COLLECTIVE else self._counts[role, peer]

    def moved(self, operation: OperationT) -> float:
        """When `operation`, or one of those for which it has to wait, last moved."""
        if operation.key.role != COLLECTIVE or operation in self.in_flight:
            return operation.progress
        return max(one.progress for one in (operation, *tuple(self.in_flight)))

    def at(self) -> dict[str, int]:
        """Operations started, as `BreakNotice.at` has them."""
        found = {}
        for (role, peer), count in list(self._counts.items()):
            place = self.label if role == COLLECTIVE else f"{self.label}{'<' if role == RECEIVING else '>'}{peer}"
            found[place] = count
        return found


class UnmatchedPiece(NamedTuple):
    """A small piece for an operation that has not begun here."""

    rank: int
    said: int
    step: int
    nth: int
    body: Tensor


class UnmatchedReceives:
    """Frames for operations that have not begun here; bounded for each sender. The owner's lock guards it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all of them."""
        self._pieces: defaultdict[Key, list[UnmatchedPiece]] = defaultdict(list)
        self._grants: defaultdict[Key, dict[int, int]] = defaultdict(dict)
        self._bytes: Counter[int] = Counter()
        self._granted: Counter[int] = Counter()

    def keep(self, key: Key, piece: UnmatchedPiece) -> None:
        """Copy a piece; MismatchError if no correct worker would have sent it."""
        rank, nbytes = piece.rank, piece.body.nbytes
        if key.role != COLLECTIVE or nbytes > EAGER:
            raise MismatchError(f"{nbytes} bytes of data come that no receive has asked for")
        if self._bytes[rank] + nbytes + UNMATCHED_COST > UNMATCHED_BYTES:
            raise MismatchError(f"more than {UNMATCHED_BYTES} bytes wait for exchanges that have not begun here")
        self._bytes[rank] += nbytes + UNMATCHED_COST
        self._pieces[key].append(piece._replace(body=piece.body.clone()))

    def grant(self, key: Key, rank: int, said: int) -> None:
        """Keep a grant of `rank`."""
        if self._granted[rank] >= GRANTS:
            raise MismatchError(f"it waits for more than {GRANTS} exchanges that have not begun here")
        self._granted[rank] += 1
        self._grants[key][rank] = said

    def take(self, key: Key) -> tuple[list[UnmatchedPiece], dict[int, int]]:
        """Remove and return the pieces and grants of an operation that begins."""
        pieces, grants = self._pieces.pop(key, []), self._grants.pop(key, {})
        for piece in pieces:
            self._bytes[piece.rank] -= piece.body.nbytes + UNMATCHED_COST
        for rank in grants:
            self._granted[rank] -= 1
        return pieces, grants
