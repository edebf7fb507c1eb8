# SPDX-License-Identifier: Apache-2.0
"""Who takes part in an asynchronous run, who owns what, and who has been silent for too long."""

from __future__ import annotations

import threading
import time

LOOK_EVERY_S = 0.25
"""How often a waiting worker looks whether somebody has been silent too long."""


class Members:
    """Who takes part, who owns which piece, and who was heard of when.

    Args:
        rank: this worker.
        owners: piece -> rank of its owner.
        size: number of workers.

    Attributes:
        lost: rank -> why.
        finished: those who have no more to push.
        parted: rank -> how many were lost when it pulled the final model.
        heard: rank -> when it asked or said something last.
    """

    def __init__(self, rank: int, size: int, owners: dict[int, int]) -> None:
        self.rank, self.size, self.owners = rank, size, owners
        self.lost: dict[int, str] = {}
        self.finished: set[int] = set()
        self.parted: dict[int, int] = {}
        self.heard = dict.fromkeys(range(size), time.monotonic())

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


class Pulse:
    """Knows when this process stood still: what others did not say in that time is not their fault.

    Args:
        timeout_s: deadline of every wait, seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        self._beat_at = self._resumed_at = time.monotonic()
        self._stood_s = 0.0

    def beat(self) -> float:
        """Called all the time by one thread, and by others before they judge; the time."""
        with self._lock:
            now = time.monotonic()
            if now - self._beat_at > max(4 * LOOK_EVERY_S, self._timeout_s / 4):
                self._resumed_at, self._stood_s = now, now - self._beat_at
            self._beat_at = now
            return now

    def overdue(self, since: float) -> bool:
        """Whether the deadline of a wait that began at `since` has passed."""
        return self.beat() - max(since, self._resumed_at) > self._timeout_s

    def stood_still(self) -> float:
        """Seconds that this process stood still a moment ago, if that was long enough to be given up; else 0."""
        recently = self.beat() - self._resumed_at < self._timeout_s
        return self._stood_s if recently and self._stood_s > self._timeout_s / 2 else 0.0
