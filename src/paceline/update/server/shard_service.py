# SPDX-License-Identifier: Apache-2.0
"""The shards that this worker owns, for the threads that serve other workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from paceline.update.server.context import ServiceContext
from paceline.update.server.failures import Failures
from paceline.update.server.owner import PushResult
from paceline.update.server.shard_updates import IncomingPush


class ShardService:
    """Changes this worker's shards, and wakes the threads that wait for that."""

    def __init__(self, context: ServiceContext, failures: Failures) -> None:
        self._context, self._failures, self._server = context, failures, context.server

    def push(self, shard: int, values: Tensor, incoming: IncomingPush, out: Tensor | None) -> PushResult:
        """Apply a push to a shard of this worker."""
        answer = self._server.push(shard, values, incoming, out)
        repeated = self._server.repeated(shard)
        if repeated:
            name = self._context.world.name(self._context.membership.rank)
            self._context.reports.inexact(
                f"{repeated} samples (batches, where the program shares whole batches) are in slices of {name} twice: "
                "after a loss they were pushed together with others"
            )
        self._context.news()
        return answer

    def held_back(self, shard: int, rank: int) -> bool:
        """Whether `rank` has to wait for slower workers; declares stalled ones lost."""
        if self._server.may_start(shard, rank):
            return False
        slow = self._server.shards[shard].clocks.holding_up(rank)
        self._failures.give_up_silent(slow, "made no step", 0.0)
        return not self._server.may_start(shard, rank)

    def idle(self, rank: int) -> None:
        """Let no worker wait for worker `rank` until its next push."""
        with self._context.changed:
            self._server.idle(rank)
        self._context.news()

    def tick(self, rank: int, clocks: Iterable[Sequence[int]]) -> None:
        """Note the clocks of worker `rank` at shards whose owner was lost."""
        with self._context.changed:
            self._server.tick(rank, clocks)
        self._context.news()
