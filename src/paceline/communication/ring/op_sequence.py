# SPDX-License-Identifier: Apache-2.0
"""A channel or a part: a sequence of operations in common order; and what came for operations not begun yet."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from paceline.communication.ring.wire import COLLECTIVE, EAGER, RECEIVING, WINDOW, Key, slot_id
from paceline.errors import MismatchError

UNMATCHED_BYTES = 1 << 24
"""Bytes of small pieces from one worker that wait here for operations not begun yet, at most."""
UNMATCHED_COST = 512
"""Bytes that each of them counts besides its body, for what keeping it costs."""
GRANTS = 1 << 16
"""Grants from one worker for operations not begun yet, at most."""


class Sequenced(Protocol):
    """An operation, as its sequence sees it."""

    key: Key
    progress: float


OperationT = TypeVar("OperationT", bound=Sequenced)


class OpSequence(Generic[OperationT]):
    """A channel or part.

    Attributes:
        label: the same on all members, and of no other slot.
        ranks: its members, ranks of the whole connection.
        under_way: collectives that have begun.
        deferred: collectives that begin when one of those is over.
        closed: nothing may be started any more.
    """

    def __init__(self, label: str, ranks: list[int]) -> None:
        self.label, self.ranks, self.id = label, ranks, slot_id(label)
        self.under_way: set[OperationT] = set()
        self.deferred: deque[OperationT] = deque()
        self.closed = False
        self._begun = 0
        self._counts: Counter[tuple[int, int]] = Counter()

    def next_key(self, role: int, peer: int) -> Key:
        """The name of the next operation of that role."""
        self._counts[role, peer] += 1
        return Key(self.id, self._counts[role, peer], role, peer)

    def full(self) -> bool:
        """Whether another collective has to wait."""
        return len(self.under_way) >= WINDOW or bool(self.deferred)

    def begins(self, operation: OperationT) -> None:
        """It is no longer deferred."""
        if operation.key.role == COLLECTIVE:
            self.under_way.add(operation)
            self._begun = operation.key.number

    def begun(self, role: int, peer: int) -> int:
        """The number of the last operation of that role that has begun."""
        return self._begun if role == COLLECTIVE else self._counts[role, peer]

    def moved(self, operation: OperationT) -> float:
        """When `operation`, or one of those for which it has to wait, last moved."""
        if operation.key.role != COLLECTIVE or operation in self.under_way:
            return operation.progress
        return max((one.progress for one in (operation, *tuple(self.under_way))), default=0.0)

    def at(self) -> dict[str, int]:
        """Operations started: as :class:`~paceline.communication.ring.failure_cause.BreakNotice` has them."""
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
    """What has come for operations not begun yet; bounded for every sender. Its owner's lock guards it."""

    def __init__(self) -> None:
        self._pieces: defaultdict[Key, list[UnmatchedPiece]] = defaultdict(list)
        self._grants: defaultdict[Key, dict[int, int]] = defaultdict(dict)
        self._bytes: Counter[int] = Counter()
        self._granted: Counter[int] = Counter()

    def keep(self, key: Key, rank: int, said: int, step: int, index: int, body: Tensor) -> None:
        """Copy a piece; MismatchError where no honest worker would have sent it."""
        cost = body.nbytes + UNMATCHED_COST
        if key.role != COLLECTIVE or body.nbytes > EAGER:
            raise MismatchError(f"{body.nbytes} bytes of data come for which nobody has asked")
        if self._bytes[rank] + cost > UNMATCHED_BYTES:
            raise MismatchError(f"more than {UNMATCHED_BYTES} bytes wait for exchanges that have not begun here")
        self._bytes[rank] += cost
        self._pieces[key].append(UnmatchedPiece(rank, said, step, index, body.clone()))

    def grant(self, key: Key, rank: int, said: int) -> None:
        """Remember that `rank` has come."""
        if self._granted[rank] >= GRANTS:
            raise MismatchError(f"it waits for more than {GRANTS} exchanges that have not begun here")
        self._granted[rank] += 1
        self._grants[key][rank] = said

    def take(self, key: Key) -> tuple[list[UnmatchedPiece], dict[int, int]]:
        """What has come for an operation that begins: pieces, and the ranks that have come."""
        pieces, grants = self._pieces.pop(key, []), self._grants.pop(key, {})
        for piece in pieces:
            self._bytes[piece.rank] -= piece.body.nbytes + UNMATCHED_COST
        for rank in grants:
            self._granted[rank] -= 1
        return pieces, grants

    def clear(self) -> None:
        """Forget all of it."""
        self._pieces.clear()
        self._grants.clear()
        self._bytes.clear()
        self._granted.clear()
