# SPDX-License-Identifier: Apache-2.0
"""What one worker owns and serves, whoever carries the questions: pieces, who takes part, and replicas for neighbours.

Nothing here waits, sends or knows of time: sockets and threads (:mod:`.threads`) and the simulated clock
(:mod:`.clocked`) call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.update.server.shard import REFUSED, Piece
from paceline.update.server.shard_updates import Arriving

REPLICA, PULLED = "replica", "last pulled values"
"""What a new owner makes a piece of."""


@dataclass(frozen=True)
class Answer:
    """What became of a push.

    Attributes:
        delay: updates that the piece had seen since the version at which the numbers were computed, or `REFUSED`.
        may_start: whether the sender may begin its next step; else the answer has to wait.
    """

    delay: int
    may_start: bool


class Server:
    """The pieces that a worker owns.

    Args:
        rank: of the owner.
        pieces: number -> piece.
        make: makes a piece of this number that is not ours yet, with the values that this worker pulled last.
        reads_before: whether an answer holds the values from before the push (elastic averaging).
        push_bytes: what a worker pushes to all owners together.
    """

    def __init__(
        self,
        rank: int,
        pieces: dict[int, Piece],
        make: Callable[[int], Piece],
        reads_before: bool = False,
        push_bytes: int = 0,
    ) -> None:
        self.push_bytes = push_bytes
        self.rank, self.pieces, self._make, self._reads_before = rank, pieces, make, reads_before
        self.gone: set[int] = set()  # done, or lost
        self._replicas: dict[int, tuple[dict[str, Any], Tensor]] = {}

    def push(self, number: int, values: Tensor, arriving: Arriving, out: Tensor | None) -> Answer:
        """Apply a push to piece `number`, and read where the rule wants the values from before it."""
        piece = self.pieces[number]
        if self._reads_before and out is not None:
            piece.pull(arriving.sender, out)
        delay = piece.push(values, arriving)
        return Answer(delay, piece.clocks.may_start(arriving.sender))

    def repeated(self, number: int) -> int:
        """Samples that piece `number` had to take twice since the last call."""
        numbered = self.pieces[number].numbered
        found, numbered.repeated = numbered.repeated, 0
        return found

    def may_start(self, number: int, rank: int) -> bool:
        """Whether the bound lets worker `rank` go on, as piece `number` sees it."""
        return self.pieces[number].clocks.may_start(rank)

    def read(self, number: int, reader: int, out: Tensor | None, after_push: bool) -> int:
        """The answer to a push, or to a bare pull: the values in `out`, where they are asked for; their version."""
        piece = self.pieces[number]
        if out is None or (after_push and self._reads_before):
            return piece.version
        return piece.pull(reader, out)

    def news(self, number: int, reader: int) -> Any:
        """What of the ledger goes with the values of piece `number` that `reader` was given."""
        return self.pieces[number].news.pop(reader, None)

    def tick(self, rank: int, clocks: Iterable[Sequence[int]]) -> None:
        """Worker `rank` has come so far: (piece, clock) pairs, of pieces whose owner was lost."""
        for number, clock in clocks:
            if number in self.pieces:
                self.pieces[number].clocks.tick(rank, clock)

    def rest(self, rank: int) -> None:
        """Worker `rank` has nothing to do for now: nobody waits for it until its next push."""
        for piece in list(self.pieces.values()):
            with piece.lock:
                piece.clocks.rest(rank)

    def leave(self, rank: int) -> None:
        """Worker `rank` is done, or lost: nobody waits for it any more."""
        self.gone.add(rank)
        for piece in list(self.pieces.values()):
            piece.leave(rank)

    # -- neighbours -------------------------------------------------------------------------------

    def begin_replica(self, number: int) -> None:
        """All workers begin with the same values, so that the heir of piece `number` has its first replica."""
        self.keep_replica(*self._make(number).snapshot())

    def keep_replica(self, about: dict[str, Any], row: Tensor) -> None:
        """Keep the newest state of a neighbour's piece."""
        self._replicas[int(about["piece"])] = (about, row)

    def adopt(self, number: int) -> tuple[int, str]:
        """Become the owner of a piece whose owner was lost: (its version, what it was made of).

        A replica says which pushes it holds; what came after it is sent again by those who live. Where the replica went
        with the worker that kept it, the values are those that this worker pulled last: nobody knows what is in them.
        """
        if number in self.pieces:
            return self.pieces[number].version, "own"
        piece = self._make(number)
        source = PULLED
        if number in self._replicas:
            piece.restore(*self._replicas.pop(number))
            source = REPLICA
        for rank in self.gone:
            piece.leave(rank)
        self.pieces[number] = piece
        return piece.version, source


def refused(answer: Answer) -> bool:
    """Whether a push was not finite."""
    return answer.delay == REFUSED
