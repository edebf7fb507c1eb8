# SPDX-License-Identifier: Apache-2.0
"""Which workers take part, which shards each owns, and which are lost: silent for too long, or gone.

A worker's threads send heartbeats whatever its program does. So a stopped process or a dead link is detected after a
quarter of the timeout. A program that makes no step, for which other workers have to wait, is declared lost only after
the whole timeout, since it may validate or save.

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
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.communication import Transport
from paceline.communication.sockets.channel import Channel
from paceline.communication.sockets.frames import Outgoing
from paceline.core import runtime
from paceline.core.world import World
from paceline.errors import PeerLostError
from paceline.update.monitor import Monitor
from paceline.update.server.shard import ShardServer

LOOK_EVERY_S = 0.25
"""How often a waiting worker checks for silent workers."""
LEAST_SILENCE_S = 2.0
"""A busy host may be silent for so long."""


def silence(timeout_s: float) -> float:
    """Seconds without any sign of life after which a worker is lost: a quarter of the timeout, at least 2."""
    return max(timeout_s / 4, min(timeout_s, LEAST_SILENCE_S))


class ServerMembership:
    """Which workers take part, which shards each owns, and when each was last active."""

    def __init__(self, rank: int, size: int, owners: dict[int, int]) -> None:
        self.rank, self.size, self.owners = rank, size, owners
        self._replica_keepers = {shard: (owner + 1) % size for shard, owner in owners.items()}
        self.lost: dict[int, str] = {}  # rank -> why
        self.finished: set[int] = set()  # workers that have no more to push
        self.confirmed: dict[int, int] = {}  # rank -> how many workers were lost when it pulled the final model
        self.left: set[int] = set()  # workers that have left at the end of the run
        self.barriers: dict[int, int] = {}  # rank -> how many barriers it has entered
        # rank -> when it was known to live, besides what its connections show
        self.heard = dict.fromkeys(range(size), runtime.monotonic())
        self.acted = dict(self.heard)  # rank -> when its program last sent a frame

    @property
    def live(self) -> list[int]:
        """Ranks that are not lost, this worker included."""
        return [rank for rank in range(self.size) if rank not in self.lost]

    def done_with(self, rank: int) -> bool:
        """Whether `rank` is lost already, or has left at the end of the run."""
        return rank in self.lost or self.confirmed.get(rank) == len(self.lost)

    def replica_keeper(self, shard: int) -> int | None:
        """The worker that has the replica of a shard: its first owner's neighbour; None once either of them is lost."""
        keeper = self._replica_keepers[shard]
        return None if keeper in self.lost or keeper == self.owners[shard] else keeper

    def take_over(self, shards: Iterable[int]) -> None:
        """Give a lost owner's shards to the worker that has their replicas."""
        self.owners |= {shard: self._replica_keepers[shard] for shard in shards}


class StallDetector:
    """Detects that this process was stopped: no worker is lost for its silence in that time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._lock = timeout_s, runtime.Lock()
        self._silence_s = silence(timeout_s)
        self._beat_at = self._resumed_at = runtime.monotonic()
        self._stalled_s, self._paused_at = 0.0, -1.0

    def beat(self) -> float:
        """The time. One thread calls this all the time, others before they judge."""
        with self._lock:
            now = runtime.monotonic()
            if now - self._beat_at > 4 * LOOK_EVERY_S:
                self._paused_at = now
            if now - self._beat_at > max(4 * LOOK_EVERY_S, self._silence_s / 4):
                self._resumed_at, self._stalled_s = now, now - self._beat_at
            self._beat_at = now
            return now

    def overdue(self, since: float) -> bool:
        """Whether the deadline of a wait that began at `since` has passed."""
        return self.beat() - max(since, self._resumed_at) > self._timeout_s

    def silent(self, since: float) -> bool:
        """Whether a worker whose last sign of life came at `since` has been silent for too long."""
        return self.beat() - max(since, self._resumed_at) > self._silence_s

    def paused(self, since: float) -> bool:
        """Whether this process was stopped for a second or longer, until later than `since`."""
        self.beat()
        return self._paused_at > since

    def stalled_s(self) -> float:
        """Seconds that this process was stopped recently, if other workers may have declared it lost; else 0."""
        recently = self.beat() - self._resumed_at < self._timeout_s
        return self._stalled_s if recently and self._stalled_s > self._silence_s / 2 else 0.0


@dataclass
class ServiceContext:
    """What all parts of a worker's socket service share."""

    transport: Transport  # the connection over which workers found each other; it counts the bytes
    server: ShardServer  # the shards that this worker owns
    membership: ServerMembership  # which workers take part
    reports: Monitor  # takes reports about lost workers
    timeout_s: float  # deadline of every wait for another worker, seconds
    # guards membership and pending exchanges; notified when they change
    changed: threading.Condition = field(init=False, default_factory=lambda: runtime.Condition(runtime.RLock()))
    stall_detector: StallDetector = field(init=False)  # detects that this process was stopped
    closed: threading.Event = field(init=False, default_factory=runtime.Event)  # set when the connections are closed
    failure: BaseException | None = field(init=False, default=None)  # why this worker cannot go on
    # called when clocks or members may have changed, and at each heartbeat; they must not wait
    watchers: list[Callable[[], None]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.stall_detector = StallDetector(self.timeout_s)

    @property
    def world(self) -> World:
        """The workers, as messages name them."""
        return self.transport.world

    @property
    def over(self) -> bool:
        """Whether this worker has failed or closes its connections."""
        return self.closed.is_set() or self.failure is not None

    def news(self) -> None:
        """Wake all that wait for a change."""
        with self.changed:
            self.changed.notify_all()
        for call in self.watchers:
            call()

    def fail(self, error: BaseException) -> None:
        """Make all waits of this worker raise `error`."""
        with self.changed:
            if not self.over:
                self.failure = error
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def lost_error(self, text: str) -> PeerLostError:
        """The error of workers that are lost, signed by this worker."""
        return PeerLostError(self.world.sign(text))

    def send(
        self,
        channel: Channel,
        kind: int,
        numbers: tuple[int, ...],
        body: Tensor | None = None,
        note: Any = None,
        deadline_s: float | None = None,
    ) -> None:
        """Send a frame and count its bytes; the default deadline is the user's."""
        self.send_all(channel, [(kind, numbers, body, note)], deadline_s)

    def send_all(
        self,
        channel: Channel,
        frames: Sequence[Outgoing],
        deadline_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Send frames, each with that deadline, and count their bytes."""
        before = channel.bytes_sent
        channel.send_all(frames, deadline_s or self.timeout_s, meanwhile)
        self.transport.sent(channel.bytes_sent - before)


Identity = list[str]
"""Kernel, process namespace, process id and start time; [] where /proc does not have them."""
DYING_S = 1.0
"""How long a process may take to end after its connections are closed."""
EXITING = 0x4
"""The kernel's flag of a process that ends."""
STARTED = 19
"""The field with a process's start, in clock ticks since boot."""


def majority(alive: set[int], counted: set[int]) -> bool:
    """Whether `alive`, a part of `counted`, may go on alone."""
    twice = 2 * len(alive)
    return twice > len(counted) or (twice == len(counted) and min(counted) in alive)


class Quorum:
    """The workers that count for a majority; missed ones no longer do after `settle_s` seconds."""

    def __init__(self, size: int, settle_s: float) -> None:
        self.counted, self._settle_s = set(range(size)), settle_s
        self._missed: dict[int, float] = {}

    def gone(self, rank: int) -> None:
        """Note that `rank` has certainly stopped."""
        self.counted.discard(rank)
        self._missed.pop(rank, None)

    def missed(self, rank: int, now: float) -> bool:
        """Note that `rank` may have stopped; whether the remaining workers may go on."""
        if self._missed and now - max(self._missed.values()) > self._settle_s:
            self.counted -= set(self._missed)
            self._missed.clear()
        if rank in self.counted:
            self._missed[rank] = now
        return majority(self.counted - set(self._missed), self.counted)

    def without(self, rank: int) -> bool:
        """Whether the other workers might have gone on if they missed `rank`."""
        return majority(self.counted - {rank}, self.counted)


def identity() -> Identity:
    """The identity of this process."""
    simulated = runtime.process()
    if simulated is not None:
        return simulated
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid"), str(os.getpid()), _fields(os.getpid())[STARTED]]
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


def _lives(pid: int, since: str, ending: bool = True) -> bool:
    """Whether the process is there; `ending`: also if it is ending."""
    if runtime.process() is not None:
        return runtime.lives(pid)
    try:
        fields = _fields(pid)
    except (OSError, IndexError):
        return False
    return fields[0] not in "ZX" and fields[STARTED] == since and (ending or not int(fields[6]) & EXITING)


OUT_S = 0.25
"""A frame that declares this worker lost may arrive so long after the other connection has ended."""
GOODBYE_S = 2.0
"""A goodbye may arrive so long after the other connection has ended."""


class Failures:
    """Declares workers lost, and stops this one where the other workers declared it lost.

    Both callbacks are called while `changed` is held.
    """

    def __init__(self, context: ServiceContext, identities: Sequence[Identity]) -> None:
        self._context, self._identities = context, identities  # the processes of all workers, by rank
        self._quorum = Quorum(context.membership.size, context.timeout_s)
        # called with a lost worker, why, whether it has certainly stopped, and its shards, which others own by then
        self.on_loss: Callable[[int, str, bool, list[int]], None] = lambda rank, why, gone, moved: None
        # called with a lost worker, and why it is lost, where it is certain only now that it has stopped
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
            if was_lost and rank not in self._quorum.counted:
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
            # A worker that was not certain declared it lost: pass the certainty on.
            if gone and rank in self._quorum.counted and rank in members.lost:
                self._quorum.gone(rank)
                self.on_gone(rank, members.lost[rank])
        if not members.done_with(rank):
            self.declare_lost(rank, why, gone)

    def declare_lost(self, rank: int, why: str, gone: bool = False) -> None:
        """Go on without a worker: its neighbour takes over its shards.

        Unless it has certainly stopped (`gone`), it may go on, on the other side of a network partition.
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
                name, counted = context.world.name(rank), len(self._quorum.counted)
                self._fail(
                    f"this worker is cut off from most of the {counted} workers ({name}: {why}), which "
                    "may go on without it, so it stops; of two halves the one with the lowest rank goes on"
                )
                return
            moved = [shard for shard, owner in members.owners.items() if owner == rank]
            without_replica = any(members.replica_keeper(shard) is None for shard in moved)
            before = sorted(members.lost)
            members.lost[rank] = why
            context.server.leave(rank)
            if without_replica:  # shards are lost with their owner: an owner and its neighbour have died
                self._fail(
                    f"{context.world.name(rank)} is lost ({why}), and no other worker has a replica of its slices "
                    f"since {context.world.names(before)} was lost before; start the run again from its last checkpoint"
                )
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

    def _declared_lost(self, why: str) -> None:
        self._fail(
            f"the other workers went on without this one ({why}); its last steps are not in the model. "
            "Start it again, or give a longer timeout_s"
        )

    def _fail(self, text: str) -> None:
        self._context.fail(self._context.lost_error(text))
