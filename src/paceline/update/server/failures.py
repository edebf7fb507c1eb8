# SPDX-License-Identifier: Apache-2.0
"""Deciding that a worker is lost, or that this one has to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import PeerLostError
from paceline.update.server.context import ServiceContext
from paceline.update.server.quorum import Identity, Quorum, is_gone

OUT_S = 0.25
"""How long the word that this worker was given up may be on its way beside a connection that has ended."""
GOODBYE_S = 2.0
"""How long a goodbye may be on its way when the connection beside it has ended already."""


@dataclass(frozen=True)
class Loss:
    """A worker was declared lost.

    Attributes:
        rank: of the lost worker.
        why: as people read it.
        gone: whether it is known not to go on by itself; else it may, on the other side of a cut.
        moved: the shards that it owned.
        successor: the worker that owns them now.
        was_successor: whether the lost worker kept the replicas of this worker's shards.
    """

    rank: int
    why: str
    gone: bool
    moved: list[int]
    successor: int
    was_successor: bool


class Failures:
    """Declares workers lost, and stops this one where the other workers declared it lost.

    Args:
        context: of the service.
        identities: the processes of all workers, by rank.

    Attributes:
        on_loss: called with each loss, while `changed` is held.
    """

    def __init__(self, context: ServiceContext, identities: Sequence[Identity]) -> None:
        self._context, self._identities = context, identities
        self._quorum = Quorum(context.membership.size, context.timeout_s)
        self.on_loss: Callable[[Loss], None] = _ignore

    def connection_ended(self, rank: int, why: str) -> None:
        """A connection has ended. Its other end may have said more over the other one, where it waits to be read.

        A worker that is done may have said goodbye there, or that this worker was given up.
        """
        context, members = self._context, self._context.membership
        with context.changed:
            patience = GOODBYE_S if rank in members.finished else OUT_S
            ended = lambda: context.closing or context.status.failure or members.done_with(rank)  # noqa: E731
            context.changed.wait_for(ended, patience)
            if members.done_with(rank):
                return
        stood_s = context.stall_detector.stood_still()
        if stood_s and self._quorum.without(members.rank):
            self._given_up(f"this process stood still for {stood_s:.0f} s")
        if rank in members.lost or context.closing:
            return
        self.declare_lost(rank, why, is_gone(self._identities[rank]))

    def declare_lost(self, rank: int, why: str, gone: bool = False) -> None:
        """Go on without a worker: its successor owns its shards.

        Args:
            rank: of the worker.
            why: as people read it.
            gone: whether it is known not to go on by itself; else it may do so, on the other side of a cut.
        """
        context, members = self._context, self._context.membership
        with context.changed:
            if context.closing or context.status.failure or rank in members.lost or rank == members.rank:
                return  # a worker that has failed decides nothing about others
            if gone:
                self._quorum.gone(rank)
            elif not self._quorum.missed(rank, time.monotonic()):
                self._cut_from_most(rank, why)
                return
            was_successor = rank == members.own_successor
            members.lost[rank] = why
            context.server.leave(rank)
            moved = members.moved(rank)
            self.on_loss(Loss(rank, why, gone, moved, members.successor(rank), was_successor))
            context.changed.notify_all()

    def told(self, rank: int, why: str, gone: bool = False) -> None:
        """Another worker has declared a worker lost, or says that it leaves."""
        if rank == self._context.rank:
            self._given_up(why)
        else:
            self.declare_lost(rank, why, gone)

    def give_up_silent(self, ranks: list[int], what: str, since: float) -> None:
        """Give up workers whose programs did nothing since the deadline; the wait for them began at `since`."""
        members = self._context.membership
        for rank in ranks:
            if rank != members.rank and self._context.stall_detector.overdue(max(since, members.acted[rank])):
                why = f"{what} for {self._context.timeout_s:g} s"
                self.declare_lost(rank, why, gone=True)  # it lives, and is told that it is out

    def _cut_from_most(self, rank: int, why: str) -> None:
        """This side of a cut is not the one that goes on."""
        name = self._context.transport.world.name(rank)
        self._context.fail(
            PeerLostError(
                self._context.sign(
                    f"this worker is cut off from most of the {self._quorum.counted} workers ({name}: {why}), which "
                    "may go on without it, so it stops; of two halves the one with the lowest rank goes on"
                )
            )
        )

    def _given_up(self, why: str) -> None:
        self._context.fail(
            PeerLostError(
                self._context.sign(
                    f"the other workers went on without this one ({why}); its last steps are not in the model. "
                    "Start it again, or give a longer timeout_s"
                )
            )
        )


def _ignore(loss: Loss) -> None:
    """Before the service has begun there is nothing to hand over."""
