# SPDX-License-Identifier: Apache-2.0
"""What all parts of a worker's socket service share: which workers take part, which shards each owns, and which have
been silent for too long.

A worker's threads send heartbeats whatever its program does. So a stopped process or a dead link is detected after a
quarter of the timeout. A program that makes no step, for which other workers have to wait, is declared lost only after
the whole timeout, since it may validate or save.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.communication import Transport
from paceline.communication.sockets.channel import Channel
from paceline.communication.sockets.frames import Outgoing
from paceline.core import runtime
from paceline.core.world import World
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
    """Which workers take part, which shards each owns, and when each was last active.

    Args:
        rank: this worker.
        size: number of workers.
        owners: shard -> rank of its owner.

    Attributes:
        lost: rank -> why.
        finished: workers that have no more to push.
        confirmed: rank -> how many workers were lost when it pulled the final model.
        left: workers that have left at the end of the run.
        barriers: rank -> how many barriers it has entered.
        heard: rank -> when it was known to live, besides what its connections show.
        acted: rank -> when its program last sent a frame.
    """

    def __init__(self, rank: int, size: int, owners: dict[int, int]) -> None:
        self.rank, self.size, self.owners = rank, size, owners
        self._replica_keepers = {shard: (owner + 1) % size for shard, owner in owners.items()}
        self.lost: dict[int, str] = {}
        self.finished: set[int] = set()
        self.confirmed: dict[int, int] = {}
        self.left: set[int] = set()
        self.barriers: dict[int, int] = {}
        self.heard = dict.fromkeys(range(size), runtime.monotonic())
        self.acted = dict(self.heard)

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

    def owned_by(self, rank: int) -> list[int]:
        """The numbers of that worker's shards."""
        return [shard for shard, owner in self.owners.items() if owner == rank]

    def take_over(self, shards: Iterable[int]) -> None:
        """Give a lost owner's shards to the worker that has their replicas."""
        self.owners |= {shard: self._replica_keepers[shard] for shard in shards}


class StallDetector:
    """Detects that this process was stopped: no worker is lost for its silence in that time.

    Args:
        timeout_s: the user's timeout.
    """

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
    """What all parts of a worker's socket service share.

    Attributes:
        transport: the connection over which workers found each other; it counts the bytes.
        server: the shards that this worker owns.
        membership: which workers take part.
        reports: takes reports about lost workers.
        timeout_s: deadline of every wait for another worker, seconds.
        changed: guards membership and pending exchanges; notified when they change.
        stall_detector: detects that this process was stopped.
        closed: set when the connections are closed.
        failure: why this worker cannot go on.
        watchers: called when clocks or members may have changed, and at each heartbeat; they must not wait.
    """

    transport: Transport
    server: ShardServer
    membership: ServerMembership
    reports: Monitor
    timeout_s: float
    changed: threading.Condition = field(init=False, default_factory=lambda: runtime.Condition(runtime.RLock()))
    stall_detector: StallDetector = field(init=False)
    closed: threading.Event = field(init=False, default_factory=runtime.Event)
    failure: BaseException | None = field(init=False, default=None)
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

    def send(
        self,
        channel: Channel,
        kind: int,
        numbers: tuple[int, ...],
        body: Tensor | None = None,
        note: Any = None,
        deadline_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Send a frame and count its bytes; the default deadline is the user's."""
        self.send_all(channel, [(kind, numbers, body, note)], deadline_s, meanwhile)

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
