# SPDX-License-Identifier: Apache-2.0
"""Decides that a worker is lost, or that this one has to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core import runtime
from paceline.errors import PeerLostError
from paceline.update.server.context import ServiceContext
from paceline.update.server.quorum import DYING_S, Identity, Quorum, is_gone

OUT_S = 0.25
"""A frame that declares this worker lost may arrive so long after the other connection has ended."""
GOODBYE_S = 2.0
"""A goodbye may arrive so long after the other connection has ended."""


class Failures:
    """Declares workers lost, and stops this one where the other workers declared it lost.

    Args:
        context: of the service.
        identities: the processes of all workers, by rank.

    Attributes:
        on_loss: called with a lost worker, why it is lost, whether it has certainly stopped, and the shards that it
            owned, which belong to the keeper of their replicas by then; `changed` is held.
        on_gone: called with a lost worker that has certainly stopped, and why it is lost, where that was not known when
            it was declared lost; `changed` is held.
    """

    def __init__(self, context: ServiceContext, identities: Sequence[Identity]) -> None:
        self._context, self._identities = context, identities
        self._quorum = Quorum(context.membership.size, context.timeout_s)
        self.on_loss: Callable[[int, str, bool, list[int]], None] = lambda rank, why, gone, moved: None
        self.on_gone: Callable[[int, str], None] = lambda rank, why: None

    def connection_ended(self, rank: int, why: str) -> None:
        """Find out why a connection to worker `rank` ended.

        The other connection to it may still hold unread frames: a goodbye, or one that declares this worker lost.
        """
        context, members, began = self._context, self._context.membership, runtime.monotonic()
        with context.changed:
            patience = GOODBYE_S if rank in members.finished else OUT_S
            ended = lambda: context.over or members.done_with(rank)  # noqa: E731
            context.changed.wait_for(ended, patience)
            if members.done_with(rank) and rank not in members.lost:
                members.left.add(rank)
                return
            was_lost = rank in members.lost
            if was_lost and not self._quorum.counts(rank):
                return
        gone = is_gone(self._identities[rank])  # first: this process may be stopped meanwhile
        if context.stall_detector.paused(began - DYING_S):
            gone = False  # the other one may have gone on before it ended
        stalled_s = 0.0 if was_lost else context.stall_detector.stalled_s()
        if stalled_s and self._quorum.without(members.rank):
            self._declared_lost(f"this process stood still for {stalled_s:.0f} s")
        with context.changed:
            if context.over:
                return
            if gone and self._quorum.counts(rank) and rank in members.lost:  # declared by a worker that was not certain
                self._quorum.gone(rank)
                self.on_gone(rank, members.lost[rank])
        if not members.done_with(rank):
            self.declare_lost(rank, why, gone)

    def declare_lost(self, rank: int, why: str, gone: bool = False) -> None:
        """Go on without a worker: its neighbour takes over its shards.

        Args:
            rank: of the lost worker.
            why: for messages.
            gone: whether it has certainly stopped; else it may go on, on the other side of a network partition.
        """
        context, members = self._context, self._context.membership
        with context.changed:
            if context.over or rank == members.rank:
                return
            if rank in members.lost:
                if gone:  # another worker is certain of what this one was not
                    self._quorum.gone(rank)
                return
            if gone:
                self._quorum.gone(rank)
            elif not self._quorum.missed(rank, runtime.monotonic()):
                self._fail_as_minority(rank, why)
                return
            moved = members.owned_by(rank)
            without_replica = any(members.replica_keeper(shard) is None for shard in moved)
            members.lost[rank] = why
            context.server.leave(rank)
            if without_replica:
                self._fail_without_replica(rank, why)
                moved = []
            members.take_over(moved)
            self.on_loss(rank, why, gone, moved)
            context.news()

    def told(self, rank: int, why: str, gone: bool = False) -> None:
        """Handle a frame by which another worker leaves, or declares a worker lost."""
        if rank == self._context.membership.rank:
            self._declared_lost(why)
        else:
            self.declare_lost(rank, why, gone)

    def give_up_silent(self, ranks: list[int], what: str, since: float) -> None:
        """Declare workers lost whose programs have been inactive for the timeout; the wait began at `since`."""
        members = self._context.membership
        for rank in ranks:
            if rank != members.rank and self._context.stall_detector.overdue(max(since, members.acted[rank])):
                why = f"{what} for {self._context.timeout_s:g} s"
                self.declare_lost(rank, why, gone=True)  # its process lives, and stops when it learns this

    def _fail_as_minority(self, rank: int, why: str) -> None:
        """Fail, because this side of a network partition may not go on."""
        world = self._context.world
        name = world.name(rank)
        self._context.fail(
            PeerLostError(
                world.sign(
                    f"this worker is cut off from most of the {self._quorum.counted} workers ({name}: {why}), which "
                    "may go on without it, so it stops; of two halves the one with the lowest rank goes on"
                )
            )
        )

    def _fail_without_replica(self, rank: int, why: str) -> None:
        """Fail, because shards are lost with their owner: an owner and its neighbour have died."""
        world = self._context.world
        self._context.fail(
            PeerLostError(
                world.sign(
                    f"{world.name(rank)} is lost ({why}), and no other worker has a replica of its slices since "
                    f"{world.names(sorted(set(self._context.membership.lost) - {rank}))} was lost before; "
                    "start the run again from its last checkpoint"
                )
            )
        )

    def _declared_lost(self, why: str) -> None:
        self._context.fail(
            PeerLostError(
                self._context.world.sign(
                    f"the other workers went on without this one ({why}); its last steps are not in the model. "
                    "Start it again, or give a longer timeout_s"
                )
            )
        )
