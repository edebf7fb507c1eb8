# SPDX-License-Identifier: Apache-2.0
"""What one worker owns and serves, whoever carries the questions: shards, who takes part, and replicas for neighbours.

Nothing here waits, sends or knows of time: sockets and threads (:mod:`.socket_service`) and the simulated clock
(:mod:`.simulated_service`) call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.update.server.shard import REFUSED, ParameterShard
from paceline.update.server.shard_updates import IncomingPush

REPLICA, PULLED = "replica", "last pulled values"
"""What a new owner makes a shard of."""


@dataclass(frozen=True)
class PushResult:
    """What became of a push.

    Attributes:
        delay: updates that the shard had seen since the version at which the numbers were computed, or `REFUSED`.
        may_start: whether the sender may begin its next step; else the answer has to wait.
    """

    delay: int
    may_start: bool


class ShardServer:
    """The shards that a worker owns.

    Args:
        rank: of the owner.
        shards: number -> shard.
        make: makes a shard of this number that is not ours yet, with the values that this worker pulled last.
        reads_before: whether an answer holds the values from before the push (elastic averaging).
        push_bytes: what a worker pushes to all owners together.
    """

    def __init__(
        self,
        rank: int,
        shards: dict[int, ParameterShard],
        make: Callable[[int], ParameterShard],
        reads_before: bool = False,
        push_bytes: int = 0,
    ) -> None:
        self.push_bytes = push_bytes
        self.rank, self.shards, self._make, self._reads_before = rank, shards, make, reads_before
        self.gone: set[int] = set()  # done, or lost
        self._replicas: dict[int, tuple[dict[str, Any], Tensor]] = {}

    def push(self, number: int, values: Tensor, incoming: IncomingPush, out: Tensor | None) -> PushResult:
        """Apply a push to shard `number`, and read where the rule wants the values from before it."""
        shard = self.shards[number]
        if self._reads_before and out is not None:
            shard.pull(incoming.sender, out)
        delay = shard.push(values, incoming)
        return PushResult(delay, shard.clocks.may_start(incoming.sender))

    def repeated(self, number: int) -> int:
        """Samples that shard `number` had to take twice since the last call."""
        numbered = self.shards[number].numbered
        found, numbered.repeated = numbered.repeated, 0
        return found

    def may_start(self, number: int, rank: int) -> bool:
        """Whether the bound lets worker `rank` go on, as shard `number` sees it."""
        return self.shards[number].clocks.may_start(rank)

    def read(self, number: int, reader: int, out: Tensor | None, after_push: bool) -> int:
        """The answer to a push, or to a bare pull: the values in `out`, where they are asked for; their version."""
        shard = self.shards[number]
        if out is None or (after_push and self._reads_before):
            return shard.version
        return shard.pull(reader, out)

    def news(self, number: int, reader: int) -> Any:
        """What of the ledger goes with the values of shard `number` that `reader` was given."""
        return self.shards[number].news.pop(reader, None)

    def tick(self, rank: int, clocks: Iterable[Sequence[int]]) -> None:
        """Worker `rank` has come so far: (shard, clock) pairs, of shards whose owner was lost."""
        for number, clock in clocks:
            if number in self.shards:
                self.shards[number].clocks.tick(rank, clock)

    def rest(self, rank: int) -> None:
        """Worker `rank` has nothing to do for now: nobody waits for it until its next push."""
        for shard in list(self.shards.values()):
            with shard.lock:
                shard.clocks.rest(rank)

    def leave(self, rank: int) -> None:
        """Worker `rank` is done, or lost: nobody waits for it any more."""
        self.gone.add(rank)
        for shard in list(self.shards.values()):
            shard.leave(rank)

    # -- neighbours -------------------------------------------------------------------------------

    def begin_replica(self, number: int) -> None:
        """All workers begin with the same values, so that the successor of shard `number` has its first replica."""
        self.keep_replica(*self._make(number).snapshot())

    def keep_replica(self, about: dict[str, Any], row: Tensor) -> None:
        """Keep the newest state of a neighbour's shard."""
        self._replicas[int(about["piece"])] = (about, row)

    def adopt(self, number: int) -> tuple[int, str]:
        """Become the owner of a shard whose owner was lost: (its version, what it was made of).

        A replica says which pushes it holds; what came after it is sent again by those who live. Where the replica went
        with the worker that kept it, the values are those that this worker pulled last: nobody knows what is in them.
        """
        if number in self.shards:
            return self.shards[number].version, "own"
        shard = self._make(number)
        source = PULLED
        if number in self._replicas:
            shard.restore(*self._replicas.pop(number))
            source = REPLICA
        for rank in self.gone:
            shard.leave(rank)
        self.shards[number] = shard
        return shard.version, source


def refused(answer: PushResult) -> bool:
    """Whether a push was not finite."""
    return answer.delay == REFUSED
