# SPDX-License-Identifier: Apache-2.0
"""Which side of a network partition goes on, so that a run never ends with two models.

A worker that is silent, or whose connection has ended, may be dead, or alive on the other side of a partition. So only
a majority goes on; of two halves the one with the lowest rank. A partition is detected worker by worker: all workers
that are missed within a deadline of each other count as missed at once.

Workers that have certainly stopped are not counted: those that announced that they leave, and processes of this host
that the kernel no longer has; workers of that host tell the other hosts. So any number of workers of one host may be
killed. A process that lived on after its connection had ended is counted: it may have gone on without this worker,
and ended well.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core import runtime

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
