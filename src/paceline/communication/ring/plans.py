# SPDX-License-Identifier: Apache-2.0
"""Plans: which pieces of an operation go where, and where those that come belong.

A plan knows nothing of sockets. Ranks are those of the whole connection. All pieces of a worker that may be sent at
once are `first`; a piece that came may set free another one (`then`). So several pieces are always on their way on
every hop, and nobody waits for the end of a step.

`Ring` is the ring algorithm. The tensor is cut into N chunks; with r = this worker's place, at step t it sends chunk
(r - t) mod N to the right, and takes chunk (r - 1 - t) mod N from the left. In the first N - 1 steps of an all-reduce
what comes is added to what is there, after which everybody has one chunk's sum; in the others, and in an all-gather,
it takes its place. Every chunk is summed in one order and copied from then on: the same bits everywhere.
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.communication.ring.wire import EAGER, pieces_of


class Piece(NamedTuple):
    """A piece to be sent: `body`, of one dimension, to rank `to`."""

    to: int
    step: int
    nth: int
    body: Tensor


class Destination(NamedTuple):
    """Where a piece that came belongs."""

    view: Tensor
    adds: bool


class OperationPlan:
    """Of one operation on one worker.

    Attributes:
        incoming: pieces that come from each rank.
        outgoing: pieces that go to each rank.
        gated: ranks that must have come to the operation before anything is sent to them.
        grants: ranks that wait for a word that this worker has come.
    """

    incoming: Mapping[int, int]
    outgoing: Mapping[int, int]
    gated: frozenset[int]
    grants: frozenset[int]

    def first(self) -> list[Piece]:
        """What may be sent at once."""
        raise NotImplementedError

    def place(self, source: int, step: int, index: int) -> Destination | None:
        """Where a piece belongs; None where no such piece is part of the operation."""
        raise NotImplementedError

    def then(self, source: int, step: int, index: int) -> Piece | None:
        """What may be sent when that piece has taken its place."""
        return None


class Pairwise(OperationPlan):
    """Everybody sends directly to everybody: one hop.

    Small parts go at once, into the mail of those who have not come yet. That is bounded because nobody gets far
    ahead of a worker from whom he needs something himself; so an empty part is a piece, too.

    Args:
        outs: what goes to each rank, tensors of one dimension.
        ins: where belongs what comes from each rank.
        asked: send also what is small only when the receiver has come.
    """

    def __init__(self, outs: Mapping[int, Tensor], ins: Mapping[int, Tensor], asked: bool = False) -> None:
        self._outs, self._ins = ({r: pieces_of(x) or [x] for r, x in side.items()} for side in (outs, ins))
        self.incoming = {rank: len(pieces) for rank, pieces in self._ins.items()}
        self.outgoing = {rank: len(pieces) for rank, pieces in self._outs.items()}
        self.gated = frozenset(rank for rank, x in outs.items() if asked or x.nbytes > EAGER)
        self.grants = frozenset(rank for rank, x in ins.items() if asked or x.nbytes > EAGER)

    def first(self) -> list[Piece]:
        return [Piece(rank, 0, k, body) for rank, pieces in self._outs.items() for k, body in enumerate(pieces)]

    def place(self, source: int, step: int, index: int) -> Destination | None:
        pieces = self._ins.get(source, [])
        return Destination(pieces[index], False) if step == 0 and 0 <= index < len(pieces) else None


class Ring(OperationPlan):
    """The ring.

    Args:
        ranks: around the ring.
        me: this worker's place among them.
        chunks: one for each place, views of one dimension into the result.
        steps: 2 (N - 1) of an all-reduce, N - 1 of an all-gather.
        adding: steps in which what comes is added.
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
    """A broadcast from each to the next one, piece by piece.

    Args:
        ranks: in the order of the chain, the source first.
        me: this worker's place among them.
        x: of one dimension.
    """

    def __init__(self, ranks: Sequence[int], me: int, x: Tensor) -> None:
        self._pieces, number = pieces_of(x), len(pieces_of(x))
        self._before = ranks[me - 1] if me > 0 else None
        self._next = ranks[me + 1] if me + 1 < len(ranks) else None
        self.incoming = {} if self._before is None else {self._before: number}
        self.outgoing = {} if self._next is None else {self._next: number}
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
