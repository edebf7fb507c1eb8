# SPDX-License-Identifier: Apache-2.0
"""The clocks of several hosts as one.

Every log counts from its own beginning, which it gives in the wall-clock time of its host. Clocks of different hosts
differ and drift. Exchanges align them: all workers learn at nearly the same time that the last worker has reached an
exchange, and each line of a log names one such exchange. So the offset between two hosts is the median over the
exchanges of each stretch of the run.

The remaining disagreement between exchanges is reported. An error that all exchanges share, such as a network that is
slower in one direction, cannot be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.observe.reports.log import RunLog, WorkerLog

STRETCHES, FEWEST = 32, 8
"""Stretches of a run at most, and exchanges of a stretch at least."""

Marks = dict[tuple[int, int, int], float]
"""(number of the run, generation, number of the exchange) -> when all had reached it, by the clock of a host."""


@dataclass
class Clocks:
    """Converts the time of a log to the clock of the first worker's host.

    Attributes:
        corrections: host -> (moments on its own clock, seconds to add there).
        exchanges: host -> number of exchanges that the correction is based on.
        error_s: host -> 95 % quantile of the remaining error of its exchanges.
        unaligned: hosts that share no exchange with the first.
    """

    corrections: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    exchanges: dict[str, int] = field(default_factory=dict)
    error_s: dict[str, float] = field(default_factory=dict)
    unaligned: list[str] = field(default_factory=list)

    def common(self, worker: WorkerLog, at_s: float) -> float:
        """A moment of a worker's log, seconds of the first host's wall clock."""
        own = worker.log_start_unix_s + at_s
        if worker.host not in self.corrections:
            return own
        return own + float(np.interp(own, *self.corrections[worker.host]))

    @property
    def text(self) -> str:
        """How well the clocks agree, for people."""
        parts = []
        if self.error_s:
            worst, count = max(self.error_s.values()), min(self.exchanges.values())
            parts.append(
                f"the clocks of {len(self.error_s) + 1} hosts were set by {count} exchanges or more, of which 95 % "
                f"agree within {1000 * worst:.2f} ms"
            )
        if self.unaligned:
            parts.append(f"not aligned, because they share no exchange: {', '.join(self.unaligned)}")
        return "; ".join(parts) or "one host, one clock"


def align_clocks(runs: Sequence[RunLog]) -> Clocks:
    """Align the hosts of some runs of one program."""
    marks = _marks(runs)
    workers = [worker for run in runs for worker in run.workers if worker.attach]
    hosts = list(dict.fromkeys(worker.host for worker in workers))
    clocks = Clocks()
    if all(run.transport == "virtual" for run in runs):  # hosts of one process
        return clocks
    for host in hosts[1:]:
        shared = sorted(marks[host].keys() & marks[hosts[0]].keys(), key=marks[host].__getitem__)
        if not shared:
            clocks.unaligned.append(host)
            continue
        own = np.array([marks[host][key] for key in shared])
        ahead = np.array([marks[hosts[0]][key] for key in shared]) - own
        clocks.corrections[host] = _medians(own, ahead)
        off = np.abs(ahead - np.interp(own, *clocks.corrections[host]))
        clocks.exchanges[host], clocks.error_s[host] = len(shared), float(np.quantile(off, 0.95))
    return clocks


def _marks(runs: Sequence[RunLog]) -> dict[str, Marks]:
    """When each host reached each exchange: the mean over its workers."""
    found: dict[str, dict[tuple[int, int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for worker in run.workers:
            for line in worker.exchanges if worker.attach else []:
                if line.met is not None and line.met_s is not None:
                    found[worker.host][run.number, line.generation, line.met].append(
                        worker.log_start_unix_s + line.met_s
                    )
    means = {host: {key: sum(own) / len(own) for key, own in marks.items()} for host, marks in found.items()}
    return defaultdict(dict, means)


def _medians(own: Any, ahead: Any) -> tuple[Any, Any]:
    """The middle of each stretch, and the median offset in it."""
    parts = max(1, min(STRETCHES, len(own) // FEWEST))
    pieces = list(zip(np.array_split(own, parts), np.array_split(ahead, parts), strict=True))
    return np.array([np.median(x) for x, _ in pieces]), np.array([np.median(y) for _, y in pieces])
