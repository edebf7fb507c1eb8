# SPDX-License-Identifier: Apache-2.0
"""What one worker owns and serves: its shards, and replicas of its predecessor's shards.

Nothing here waits, sends or depends on time: sockets and threads (:mod:`.socket_service`) and the simulated clock
(:mod:`.simulated_service`) call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.update.server.shard import IncomingPush, ParameterShard


@dataclass(frozen=True)
class PushResult:
    """The result of a push.

    Attributes:
        delay: updates of the shard since the version at which the push was computed, or `REFUSED`.
        may_start: whether the sender may begin its next step; else the answer has to wait.
    """

    delay: int
    may_start: bool


class ShardServer:
    """The shards that a worker owns.

    Attributes:
        reads_before: as the argument.

    Args:
        rank: of the owner.
        shards: number -> shard.
        make: makes a shard of this number with the values that this worker pulled last.
        reads_before: whether an answer holds the values from before the push (elastic averaging).
        push_bytes: of a worker's push to all owners together.
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
        self.rank, self.shards, self._make, self.reads_before = rank, shards, make, reads_before
        self.gone: set[int] = set()  # workers that are done or lost
        self._replicas: dict[int, tuple[dict[str, Any], Tensor]] = {}

    def push(self, number: int, values: Tensor, incoming: IncomingPush, out: Tensor | None) -> PushResult:
        """Apply a push to shard `number`; first read the values where the rule answers with those."""
        shard = self.shards[number]
        if self.reads_before and out is not None:
            shard.pull(incoming.sender, out)
        delay = shard.push(values, incoming)
        return PushResult(delay, shard.clocks.may_start(incoming.sender))

    def repeated(self, number: int) -> int:
        """Samples that shard `number` had to apply twice since the last call."""
        numbered = self.shards[number].numbered
        found, numbered.repeated = numbered.repeated, 0
        return found

    def may_start(self, number: int, rank: int) -> bool:
        """Whether the bound on staleness lets worker `rank` go on, by the clocks of shard `number`."""
        return self.shards[number].clocks.may_start(rank)

    def read(self, number: int, reader: int, out: Tensor | None, after_push: bool) -> int:
        """Answer a push or a bare pull: write the values to `out`, where given; their version."""
        shard = self.shards[number]
        if out is None or (after_push and self.reads_before):
            return shard.version
        return shard.pull(reader, out)

    def news(self, number: int, reader: int) -> Any:
        """The ledger's news that go with the values of shard `number` that `reader` got."""
        return self.shards[number].news.pop(reader, None)

    def tick(self, rank: int, clocks: Iterable[Sequence[int]]) -> None:
        """Note (shard, clock) pairs of worker `rank`, of shards whose owner was lost."""
        for number, clock in clocks:
            if number in self.shards:
                self.shards[number].clocks.tick(rank, clock)

    def idle(self, rank: int) -> None:
        """Let no worker wait for worker `rank` until its next push."""
        for shard in list(self.shards.values()):
            with shard.lock:
                shard.clocks.idle(rank)

    def leave(self, rank: int) -> None:
        """Let no worker wait for worker `rank` any more: it is done or lost."""
        self.gone.add(rank)
        for shard in list(self.shards.values()):
            shard.leave(rank)

    # -- replicas ---------------------------------------------------------------------------------

    def begin_replica(self, number: int) -> None:
        """Make the first replica of shard `number`: all workers begin with the same values."""
        self.keep_replica(*self._make(number).snapshot())

    def keep_replica(self, about: dict[str, Any], row: Tensor) -> None:
        """Keep the newest state of another worker's shard."""
        self._replicas[int(about["piece"])] = (about, row)

    def adopt(self, number: int) -> int:
        """Become the owner of a shard whose owner was lost, with the state of its replica; its version.

        A replica states which pushes it holds; live workers send the later ones again.
        """
        shard = self._make(number)
        shard.restore(*self._replicas.pop(number))
        for rank in self.gone:
            shard.leave(rank)
        self.shards[number] = shard
        return shard.version
