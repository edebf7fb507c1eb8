# SPDX-License-Identifier: Apache-2.0
"""Which workers take part in an asynchronous run, which shards each owns, and which have been silent for too long.

A worker's threads send heartbeats whatever its program does. So a stopped process or a dead link is detected after a
quarter of the timeout. A program that makes no step, for which other workers have to wait, is declared lost only after
the whole timeout, since it may validate or save.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core import runtime

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
