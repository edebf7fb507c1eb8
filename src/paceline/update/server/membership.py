# SPDX-License-Identifier: Apache-2.0
"""Who takes part in an asynchronous run, who owns what, and who has been silent for too long.

A worker's threads say that it lives whatever its program does. So a process that stands still, or a link that carries
nothing, is known after a quarter of the timeout; a program that makes no step, for which others have to wait, only
after all of it, since it may validate or save.
"""

from __future__ import annotations

import threading
import time

LOOK_EVERY_S = 0.25
"""How often a waiting worker looks whether somebody has been silent too long."""
LEAST_SILENCE_S = 2.0
"""A shorter silence is that of a busy host."""


def silence(timeout_s: float) -> float:
    """Seconds without any sign of life after which a worker is given up: a quarter of the timeout, at least 2."""
    return max(timeout_s / 4, min(timeout_s, LEAST_SILENCE_S))


class ServerMembership:
    """Who takes part, who owns which shard, and who was heard of when.

    Args:
        rank: this worker.
        owners: shard -> rank of its owner.
        size: number of workers.

    Attributes:
        lost: rank -> why.
        finished: those who have no more to push.
        parted: rank -> how many were lost when it pulled the final model.
        here: rank -> how often it has come to a point at which all wait for all.
        heard: rank -> when it was known to live, beside what its connections show.
        acted: rank -> when its program asked or said something last.
    """

    def __init__(self, rank: int, size: int, owners: dict[int, int]) -> None:
        self.rank, self.size, self.owners = rank, size, owners
        self.lost: dict[int, str] = {}
        self.finished: set[int] = set()
        self.parted: dict[int, int] = {}
        self.here: dict[int, int] = {}
        self.heard = dict.fromkeys(range(size), time.monotonic())
        self.acted = dict(self.heard)

    @property
    def live(self) -> list[int]:
        """Those who are not lost, this worker included."""
        return [rank for rank in range(self.size) if rank not in self.lost]

    def done_with(self, rank: int) -> bool:
        """Whether `rank` is lost already, or has left as one does at the end, with everybody else's knowledge."""
        return rank in self.lost or self.parted.get(rank) == len(self.lost)

    def successor(self, rank: int) -> int:
        """The next worker in rank order that is not lost."""
        for step in range(1, self.size + 1):
            if (rank + step) % self.size not in self.lost:
                return (rank + step) % self.size
        return self.rank

    @property
    def own_successor(self) -> int | None:
        """Who would take over what this worker owns; None where nobody else lives."""
        successor = self.successor(self.rank)
        return None if successor == self.rank else successor

    def moved(self, rank: int) -> list[int]:
        """The shards of a lost worker, which its successor owns from now on."""
        shards = [shard for shard, owner in self.owners.items() if owner == rank]
        self.owners |= dict.fromkeys(shards, self.successor(rank))
        return shards


class StallDetector:
    """Knows when this process stood still: what others did not say in that time is not their fault.

    Args:
        timeout_s: the user's, of which all deadlines are made.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        self._silence_s = silence(timeout_s)
        self._beat_at = self._resumed_at = time.monotonic()
        self._stood_s = 0.0

    def beat(self) -> float:
        """Called all the time by one thread, and by others before they judge; the time."""
        with self._lock:
            now = time.monotonic()
            if now - self._beat_at > max(4 * LOOK_EVERY_S, self._silence_s / 4):
                self._resumed_at, self._stood_s = now, now - self._beat_at
            self._beat_at = now
            return now

    def overdue(self, since: float) -> bool:
        """Whether the deadline of a wait that began at `since` has passed."""
        return self.beat() - max(since, self._resumed_at) > self._timeout_s

    def silent(self, since: float) -> bool:
        """Whether a worker that was heard of at `since` has been silent for too long."""
        return self.beat() - max(since, self._resumed_at) > self._silence_s

    def stood_still(self) -> float:
        """Seconds that this process stood still a moment ago, if that was long enough to be given up; else 0."""
        recently = self.beat() - self._resumed_at < self._timeout_s
        return self._stood_s if recently and self._stood_s > self._silence_s / 2 else 0.0
