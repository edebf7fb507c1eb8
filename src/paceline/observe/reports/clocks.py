# SPDX-License-Identifier: Apache-2.0
"""The clocks of several hosts as one.

Every log counts from its own beginning, which it gives in the time of its host's wall clock. Processes of a host share
that clock; those of different hosts do not, and no clock runs like another. What ties them together are exchanges:
all workers learn at nearly the same time that the last of them has come, and each line of a log names one such
exchange. So the difference between two hosts is taken anew in every stretch of the run, as the median over its
exchanges.

What remains is said, too: in how far exchanges still disagree. A part that is the same in all of them, such as the
delay of a network that is slower in one direction, cannot be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.observe.reports.log import RunLog, WorkerLog

STRETCHES, FEWEST = 32, 8
"""A run is cut into so many stretches at most, and one has so many exchanges at least."""

Marks = dict[tuple[int, int, int], float]
"""(number of the run, generation, number of the exchange) -> when a host knew that all had come, on its own clock."""


@dataclass
class Clocks:
    """From the time of a log to the time of the first worker's host.

    Attributes:
        corrections: host -> (moments on its own clock, seconds to add there).
        exchanges: of how many exchanges that was learnt, by host.
        error_s: host -> what 95 % of its exchanges are off at most, afterwards.
        apart: hosts whose clock could not be set.
    """

    corrections: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    exchanges: dict[str, int] = field(default_factory=dict)
    error_s: dict[str, float] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)

    def common(self, worker: WorkerLog, at_s: float) -> float:
        """A moment of a worker's log, seconds of the first host's wall clock."""
        own = began(worker) + at_s
        if worker.host not in self.corrections:
            return own
        return own + float(np.interp(own, *self.corrections[worker.host]))

    @property
    def text(self) -> str:
        """How far the clocks can be trusted, for people."""
        parts = []
        if self.error_s:
            worst, count = max(self.error_s.values()), min(self.exchanges.values())
            parts.append(
                f"the clocks of {len(self.error_s) + 1} hosts were set by {count} exchanges or more, of which 95 % "
                f"agree within {1000 * worst:.2f} ms"
            )
        if self.apart:
            parts.append(f"as their own clocks say, because no exchange tells: {', '.join(self.apart)}")
        return "; ".join(parts) or "one host, one clock"


def began(worker: WorkerLog) -> float:
    """When a worker's log began, by the wall clock of its host."""
    return float(worker.attach.get("unix_s", 0.0)) - float(worker.attach.get("at_s", 0.0))


def align_clocks(runs: Sequence[RunLog]) -> Clocks:
    """The clocks of the hosts of some runs of one program."""
    marks = _marks(runs)
    workers = [worker for run in runs for worker in run.workers if worker.attach]
    hosts = list(dict.fromkeys(worker.host for worker in workers))
    clocks = Clocks()
    for host in hosts[1:] if not _virtual(runs) else []:
        shared = sorted(marks[host].keys() & marks[hosts[0]].keys(), key=marks[host].__getitem__)
        if not shared:
            clocks.apart.append(host)
            continue
        own = np.array([marks[host][key] for key in shared])
        ahead = np.array([marks[hosts[0]][key] for key in shared]) - own
        clocks.corrections[host] = _medians(own, ahead)
        off = np.abs(ahead - np.interp(own, *clocks.corrections[host]))
        clocks.exchanges[host], clocks.error_s[host] = len(shared), float(np.quantile(off, 0.95))
    return clocks


def _virtual(runs: Sequence[RunLog]) -> bool:
    """Whether the hosts are made up, in one process."""
    return all(run.transport == "virtual" for run in runs)


def _marks(runs: Sequence[RunLog]) -> dict[str, Marks]:
    """What each host says of exchanges: the mean over its workers."""
    found: dict[str, dict[tuple[int, int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for worker in run.workers:
            for line in worker.exchanges if worker.attach else []:
                if line.met is not None and line.met_s is not None:
                    found[worker.host][run.number, line.generation, line.met].append(began(worker) + line.met_s)
    means = {host: {key: sum(own) / len(own) for key, own in marks.items()} for host, marks in found.items()}
    return defaultdict(dict, means)


def _medians(own: Any, ahead: Any) -> tuple[Any, Any]:
    """Moments of one clock, and the usual difference to the other around each of them."""
    parts = max(1, min(STRETCHES, len(own) // FEWEST))
    pieces = list(zip(np.array_split(own, parts), np.array_split(ahead, parts), strict=True))
    return np.array([np.median(x) for x, _ in pieces]), np.array([np.median(y) for _, y in pieces])
