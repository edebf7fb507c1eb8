# SPDX-License-Identifier: Apache-2.0
"""Decides that a worker is lost, or that this one has to stop.

A worker that is silent, or whose connection has ended, may be dead, or alive on the other side of a network partition.
So that a run never ends with two models, only a majority goes on; of two halves the one with the lowest rank. A
partition is detected worker by worker: all workers that are missed within a deadline of each other count as missed at
once.

Workers that have certainly stopped are not counted: those that announced that they leave, and processes of this host
that the kernel no longer has; workers of that host tell the other hosts. So any number of workers of one host may be
killed. A process that lived on after its connection had ended is counted: it may have gone on without this worker,
and ended well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.core import runtime
from paceline.errors import PeerLostError
from paceline.update.server.context import ServiceContext

Identity = list[str]
"""Kernel, process namespace, process id and start time; [] where /proc does not have them."""
DYING_S = 1.0
"""How long a process may take to end after its connections are closed."""
EXITING = 0x4
"""The kernel's flag of a process that ends."""


def majority(alive: set[int], counted: set[int]) -> bool:
    """Whether `alive`, a part of `counted`, may go on alone."""
    twice = 2 * len(alive)
    return twice > len(counted) or (twice == len(counted) and min(counted) in alive)


class Quorum:
    """The workers that count for a majority.

    Args:
        size: number of workers.
        settle_s: seconds after which missed workers no longer count.
    """

    def __init__(self, size: int, settle_s: float) -> None:
        self._counted, self._settle_s = set(range(size)), settle_s
        self._missed: dict[int, float] = {}

    def gone(self, rank: int) -> None:
        """Note that `rank` has certainly stopped."""
        self._counted.discard(rank)
        self._missed.pop(rank, None)

    def counts(self, rank: int) -> bool:
        """Whether `rank` counts: it may live."""
        return rank in self._counted

    def missed(self, rank: int, now: float) -> bool:
        """Note that `rank` may have stopped; whether the remaining workers may go on."""
        if self._missed and now - max(self._missed.values()) > self._settle_s:
            self._counted -= set(self._missed)
            self._missed.clear()
        if rank in self._counted:
            self._missed[rank] = now
        return majority(self._counted - set(self._missed), self._counted)

    def without(self, rank: int) -> bool:
        """Whether the other workers might have gone on if they missed `rank`."""
        return majority(self._counted - {rank}, self._counted)

    @property
    def counted(self) -> int:
        """How many workers count."""
        return len(self._counted)


def identity() -> Identity:
    """The identity of this process."""
    simulated = runtime.process()
    if simulated is not None:
        return simulated
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid"), str(os.getpid()), _since(os.getpid())]
    except OSError:
        return []


def is_gone(who: Identity) -> bool:
    """Whether that process has ended, or is ending and has within a second; False for processes of other hosts."""
    mine = identity()
    if not who or who[:2] != mine[:2]:
        return False
    end, lived = runtime.monotonic() + DYING_S, _lives(int(who[2]), who[3], ending=False)
    while _lives(int(who[2]), who[3]):
        if runtime.monotonic() > end:
            return False
        runtime.sleep(0.01)
    return not lived


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _since(pid: int) -> str:
    return _fields(pid)[19]  # in clock ticks since boot


def _lives(pid: int, since: str, ending: bool = True) -> bool:
    """Whether the process is there; `ending`: also if it is ending."""
    if runtime.process() is not None:
        return runtime.lives(pid)
    try:
        fields = _fields(pid)
    except (OSError, IndexError):
        return False
    return fields[0] not in "ZX" and fields[19] == since and (ending or not int(fields[6]) & EXITING)


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
