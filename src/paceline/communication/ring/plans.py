# SPDX-License-Identifier: Apache-2.0
"""Plans: which pieces of an operation a worker sends, and where it puts the pieces that arrive.

A plan uses no sockets. Ranks are those of the whole connection. `first` are the pieces that may be sent at once; a
piece that arrives may release another one (`then`). So several pieces are in flight on every hop, and no worker waits
for the end of a step.

`Ring` is the ring algorithm. The tensor is cut into N chunks; with r = this worker's place, at step t it sends chunk
(r - t) mod N to the right, and takes chunk (r - 1 - t) mod N from the left. In the first N - 1 steps of an all-reduce
what arrives is added to the worker's own chunk, after which each worker has one chunk's sum; in the other steps, and in
an all-gather, it replaces the chunk. Every chunk is summed in one order and then copied: the same bits everywhere.
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.communication.ring.wire import EAGER, pieces_of


class Piece(NamedTuple):
    """A piece to be sent: `body`, one-dimensional, to rank `to`."""

    to: int
    step: int
    nth: int
    body: Tensor


class Destination(NamedTuple):
    """Where a piece that arrived belongs."""

    view: Tensor
    adds: bool


class OperationPlan(ABC):
    """The plan of one operation on one worker.

    Attributes:
        incoming: number of pieces from each rank.
        outgoing: number of pieces to each rank.
        gated: ranks that must grant before this worker sends to them.
        grants: ranks that wait for this worker's grant.
    """

    incoming: Mapping[int, int]
    outgoing: Mapping[int, int]
    gated: frozenset[int]
    grants: frozenset[int]

    @abstractmethod
    def first(self) -> list[Piece]:
        """The pieces that may be sent at once."""

    @abstractmethod
    def place(self, source: int, step: int, index: int) -> Destination | None:
        """Where a piece belongs; None if the operation has no such piece."""

    def then(self, source: int, step: int, index: int) -> Piece | None:
        """The piece that may be sent once that piece is in its place."""
        return None


class Pairwise(OperationPlan):
    """Each worker sends directly to each other worker: one hop.

    Small parts are sent at once; a receiver that has not begun the operation keeps them. The memory for that is bounded
    because no worker gets far ahead of one from which it needs something itself; so an empty part is a piece, too.

    Args:
        outs: what goes to each rank, one-dimensional tensors.
        ins: where the data of each rank belong.
        asked: send small parts only after a grant, too.
    """

    def __init__(self, outs: Mapping[int, Tensor], ins: Mapping[int, Tensor], asked: bool = False) -> None:
        self._outs, self._ins = ({r: pieces_of(x) or [x] for r, x in side.items()} for side in (outs, ins))
        self.incoming = {rank: len(pieces) for rank, pieces in self._ins.items()}
        self.outgoing = {rank: len(pieces) for rank, pieces in self._outs.items()}
        self.gated, self.grants = (
            frozenset(rank for rank, x in side.items() if asked or x.nbytes > EAGER) for side in (outs, ins)
        )

    def first(self) -> list[Piece]:
        return [Piece(rank, 0, k, body) for rank, pieces in self._outs.items() for k, body in enumerate(pieces)]

    def place(self, source: int, step: int, index: int) -> Destination | None:
        pieces = self._ins.get(source, [])
        return Destination(pieces[index], False) if step == 0 and 0 <= index < len(pieces) else None


class Ring(OperationPlan):
    """The ring algorithm.

    Args:
        ranks: around the ring.
        me: this worker's place among them.
        chunks: one for each place, one-dimensional views into the result.
        steps: 2 (N - 1) of an all-reduce, N - 1 of an all-gather.
        adding: steps in which what arrives is added.
    """

    def __init__(self, ranks: Sequence[int], me: int, chunks: Sequence[Tensor], steps: int, adding: int) -> None:
        size = len(ranks)
        self._me, self._size, self._steps, self._adding = me, size, steps, adding
        self._left, self._right = ranks[me - 1], ranks[(me + 1) % size]
        self._pieces = [pieces_of(chunk) for chunk in chunks]
        counts = [len(pieces) for pieces in self._pieces]
        self.incoming = {self._left: sum(counts[(me - 1 - t) % size] for t in range(steps))}
        self.outgoing = {self._right: sum(counts[(me - t) % size] for t in range(steps))}
        self.gated, self.grants = frozenset({self._right}), frozenset({self._left})

    def first(self) -> list[Piece]:
        return [Piece(self._right, 0, k, body) for k, body in enumerate(self._pieces[self._me])]

    def place(self, source: int, step: int, index: int) -> Destination | None:
        if source != self._left or not 0 <= step < self._steps:
            return None
        pieces = self._pieces[(self._me - 1 - step) % self._size]
        return Destination(pieces[index], step < self._adding) if 0 <= index < len(pieces) else None

    def then(self, source: int, step: int, index: int) -> Piece | None:
        if step + 1 == self._steps:
            return None
        return Piece(self._right, step + 1, index, self._pieces[(self._me - 1 - step) % self._size][index])


class Chain(OperationPlan):
    """A broadcast from each worker to the next, piece by piece.

    Args:
        ranks: in the order of the chain, the source first.
        me: this worker's place among them.
        x: one-dimensional.
    """

    def __init__(self, ranks: Sequence[int], me: int, x: Tensor) -> None:
        self._pieces = pieces_of(x)
        self._before = ranks[me - 1] if me > 0 else None
        self._next = ranks[me + 1] if me + 1 < len(ranks) else None
        self.incoming = {} if self._before is None else {self._before: len(self._pieces)}
        self.outgoing = {} if self._next is None else {self._next: len(self._pieces)}
        self.grants, self.gated = frozenset(self.incoming), frozenset(self.outgoing)

    def first(self) -> list[Piece]:
        if self._before is not None or self._next is None:
            return []
        return [Piece(self._next, 0, k, body) for k, body in enumerate(self._pieces)]

    def place(self, source: int, step: int, index: int) -> Destination | None:
        fits = source == self._before and step == 0 and 0 <= index < len(self._pieces)
        return Destination(self._pieces[index], False) if fits else None

    def then(self, source: int, step: int, index: int) -> Piece | None:
        return None if self._next is None else Piece(self._next, 0, index, self._pieces[index])
