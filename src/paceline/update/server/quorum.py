# SPDX-License-Identifier: Apache-2.0
"""Which side of a cut goes on, so that a run never ends with two models.

A worker that is silent, or whose connection has ended, may be dead, or alive on the other side of a cut, where it takes
this side for dead. So only a majority goes on; of two halves the one with the lowest rank. A cut is found worker by
worker: all who are missed within a deadline of each other count as missed at once.

Workers that are known to be gone are not counted: who said that it leaves, and a process of this host that the kernel
no longer has. Their neighbours on that host tell the others. So any number of workers may be killed on one host.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

Identity = list[str]
"""Which kernel, which of its process namespaces, which process, since when; [] where /proc does not say."""
DYING_S = 1.0
"""How long a process may take to be gone after its connections are closed."""


def majority(alive: set[int], counted: set[int]) -> bool:
    """Whether `alive`, a part of `counted`, may go on without the others."""
    twice = 2 * len(alive)
    return twice > len(counted) or (twice == len(counted) and min(counted) in alive)


class Quorum:
    """Whom this worker still counts.

    Args:
        size: number of workers.
        settle_s: seconds after which those that were missed are out for good, for whoever may go on.
    """

    def __init__(self, size: int, settle_s: float) -> None:
        self._counted, self._settle_s = set(range(size)), settle_s
        self._missed: dict[int, float] = {}

    def gone(self, rank: int) -> None:
        """It is known that `rank` does not go on."""
        self._counted.discard(rank)
        self._missed.pop(rank, None)

    def missed(self, rank: int, now: float) -> bool:
        """Nobody knows whether `rank` goes on; whether those who are left may, all in all."""
        if self._missed and now - max(self._missed.values()) > self._settle_s:
            self._counted -= set(self._missed)
            self._missed.clear()
        if rank in self._counted:
            self._missed[rank] = now
        return majority(self._counted - set(self._missed), self._counted)

    def without(self, rank: int) -> bool:
        """Whether all others, had they missed `rank`, might have gone on."""
        return majority(self._counted - {rank}, self._counted)

    @property
    def counted(self) -> int:
        """How many are counted."""
        return len(self._counted)


def identity() -> Identity:
    """Of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid"), str(os.getpid()), _since(os.getpid())]
    except OSError:
        return []


def is_gone(who: Identity) -> bool:
    """Whether that process is known to be over, or is so within a second; False where only another host knows."""
    mine = identity()
    if not who or who[:2] != mine[:2]:
        return False
    end = time.monotonic() + DYING_S
    while _lives(int(who[2]), who[3]):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _since(pid: int) -> str:
    return _fields(pid)[19]  # in clock ticks since the kernel has run


def _lives(pid: int, since: str) -> bool:
    try:
        fields = _fields(pid)
    except (OSError, IndexError):
        return False
    return fields[0] not in "ZX" and fields[19] == since
