# SPDX-License-Identifier: Apache-2.0
"""Changes to the shards that this worker owns, between the threads that make them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from paceline.update.server.context import ServiceContext
from paceline.update.server.failures import Failures
from paceline.update.server.membership import LOOK_EVERY_S
from paceline.update.server.owner import PushResult
from paceline.update.server.shard_updates import IncomingPush


class ShardService:
    """This worker's shards, for the threads that serve other workers.

    Args:
        context: of the service.
        failures: told about workers that hold up others.
    """

    def __init__(self, context: ServiceContext, failures: Failures) -> None:
        self._context, self._failures, self._server = context, failures, context.server

    def push(self, shard: int, values: Tensor, incoming: IncomingPush, out: Tensor | None) -> PushResult:
        """Apply a push to a shard of this worker."""
        answer = self._server.push(shard, values, incoming, out)
        repeated = self._server.repeated(shard)
        if repeated:
            name = self._context.transport.world.name(self._context.rank)
            self._context.reports.inexact(
                f"{repeated} samples are in slices of {name} twice: after a loss they were pushed together with others"
            )
        with self._context.changed:
            self._context.changed.notify_all()
        return answer

    def held_back(self, shard: int, rank: int) -> bool:
        """Wait a little for the slowest; whether `rank` has to wait on. Programs that make no step are given up."""
        context = self._context
        with context.changed:
            if context.closing or rank in context.membership.lost or self._server.may_start(shard, rank):
                return False
            context.changed.wait(LOOK_EVERY_S)
            slow = self._server.shards[shard].clocks.holding_up(rank)
        self._failures.give_up_silent(slow, "made no step", 0.0)
        return True

    def rest(self, rank: int) -> None:
        """Worker `rank` has nothing to do for now: nobody waits for it until its next push."""
        with self._context.changed:
            self._server.rest(rank)
            self._context.changed.notify_all()

    def tick(self, rank: int, clocks: Iterable[Sequence[int]]) -> None:
        """Worker `rank` says how far it is, of shards whose owner was lost."""
        with self._context.changed:
            self._server.tick(rank, clocks)
            self._context.changed.notify_all()
