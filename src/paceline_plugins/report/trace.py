# SPDX-License-Identifier: Apache-2.0
"""`write_trace`: the logs of all workers as one timeline, in the trace event format that Perfetto opens.

:mod:`.trace` makes the events.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from paceline.observe.reports.events import ExchangeEvent
from paceline.observe.reports.log import RunLog, WorkerLog
from paceline.observe.reports.read import read_runs

# The clocks of several hosts as one.
#
# Every log counts from its own beginning, which it gives in the wall-clock time of its host. Clocks of different hosts
# differ and drift. Exchanges align them: all workers learn at nearly the same time that the last worker has reached an
# exchange, and each line of a log names one such exchange. So the offset between two hosts is the median over the
# exchanges of each stretch of the run.
#
# The remaining disagreement between exchanges is reported. An error that all exchanges share, such as a network that is
# slower in one direction, cannot be seen.

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


# One worker's log as trace events.
#
# A process of the trace is a worker; its threads are its activities: compute, data, wait, exchange, and faults. A
# line of a log has the duration of each since the line before, not their order: the trace draws data, compute, wait,
# exchange, as in a block. Exchanges that follow each other within a quarter of a second share a line.

TraceEvent = dict[str, Any]

THREADS = ("compute", "data", "wait", "exchange", "faults")
ORDER = ("data", "compute", "wait", "exchange")
NEXT_S = 0.1
"""Values that are reported faster are thinned out."""

Window = tuple[float, float, float]
"""Start of the run, and start and end of the drawn part; seconds of the common clock."""


def _thread(run: RunLog, name: str) -> int:
    """Number of a thread; a second run of one program has its own threads."""
    return 1 + THREADS.index(name) + (run.number - 1) * len(THREADS)


def names(run: RunLog, worker: WorkerLog) -> Iterator[TraceEvent]:
    """The labels of a worker and its threads."""

    def label(what: str, thread: int = 0, **facts: Any) -> TraceEvent:
        return {"ph": "M", "name": what, "pid": worker.rank, "tid": thread, "ts": 0, "args": facts}

    yield label("process_name", name=f"worker {worker.rank} on {worker.host}")
    yield label("process_sort_index", sort_index=worker.rank)
    for name in THREADS:
        thread = _thread(run, name)
        yield label("thread_name", thread, name=name if run.number == 1 else f"{name} ({run.number})")
        yield label("thread_sort_index", thread, sort_index=thread)


def spans(run: RunLog, worker: WorkerLog, clocks: Clocks, window: Window, folded: int) -> Iterator[TraceEvent]:
    """Each line of a log as a span in every thread that it has time for; whole microseconds, none before 0."""
    before = max(0, round(1e6 * (clocks.common(worker, 0.0) - window[0])))
    for first in range(0, len(worker.exchanges), folded):
        lines = worker.exchanges[first : first + folded]
        end = round(1e6 * (clocks.common(worker, lines[-1].at_s) - window[0]))
        parts = {name: sum(_part(line, name) for line in lines) for name in ORDER}
        total = sum(parts.values())
        start = max(before, end - round(1e6 * total))
        scale = (end - start) / total if total > 0 else 0.0  # below a million where clocks were corrected
        place, done = start, 0.0
        for name in ORDER:
            done += parts[name]
            stop = start + round(scale * done)
            if stop > place:
                about = {"seconds": round(parts[name], 6), **_facts(lines)}
                where = {"pid": worker.rank, "tid": _thread(run, name), "ts": place, "dur": stop - place}
                yield {"ph": "X", "name": name, "cat": "worker", **where, "args": about}
            place = max(place, stop)
        before = max(before, end)


def _part(line: ExchangeEvent, name: str) -> float:
    seconds = {"data": line.data_s or 0.0, "compute": line.compute_s, "wait": line.wait_s, "exchange": line.exchange_s}
    return max(0.0, seconds[name])


def _facts(lines: Sequence[ExchangeEvent]) -> TraceEvent:
    return {
        "block": lines[-1].block,
        "exchanges": sum(line.exchanges for line in lines),
        "minibatches": sum(line.minibatches for line in lines),
        "total_minibatches": lines[-1].total_minibatches,
        "bytes": sum(line.bytes for line in lines),
    }


def moments(run: RunLog, worker: WorkerLog, clocks: Clocks, window: Window) -> Iterator[TraceEvent]:
    """Faults and other instants, and the reported values."""

    def at(at_s: float) -> TraceEvent:
        return {"ts": max(0, round(1e6 * (clocks.common(worker, at_s) - window[0]))), "pid": worker.rank}

    for at_s, name, text in _faults(worker):
        about = {"ph": "i", "s": "p", "tid": _thread(run, "faults"), "cat": "fault", "args": {"what": text}}
        yield {"name": name, **about, **at(at_s)}
    drawn_s: dict[str, float] = {}
    for value in worker.values:
        if math.isfinite(value.value) and value.at_s - drawn_s.get(value.name, -math.inf) >= NEXT_S:
            drawn_s[value.name] = value.at_s
            yield {"name": value.name, "ph": "C", "tid": 0, "args": {"value": value.value}, **at(value.at_s)}


def _faults(worker: WorkerLog) -> Iterator[tuple[float, str, str]]:
    for gone in worker.lost:
        yield gone.at_s, f"worker {gone.rank} lost", gone.why
    for out in worker.left_out:
        yield out.at_s, f"worker {out.rank} left out", out.why
    for taken in worker.takeovers:
        yield taken.at_s, f"takes over from worker {taken.slice_of}", f"from {taken.source}, version {taken.version}"
    for tuned in worker.tuned:
        yield tuned.at_s, "refused" if tuned.refused else "tuned", tuned.refused or str(tuned.changes)
    for moment in worker.moments:
        yield moment.at_s, moment.kind, moment.text


MOST = 400_000
"""Lines of logs that are drawn one by one; in longer logs a span is several lines."""


@dataclass(frozen=True)
class Trace:
    """A trace that was written.

    Attributes:
        path: the file.
        workers: how many.
        slices: spans of time in it.
        folded: lines of the logs that a span stands for.
        clock: how far the workers' clocks agree, in words.
    """

    path: Path
    workers: int
    slices: int
    folded: int
    clock: str


def write_trace(
    directory: str | Path,
    output: str | Path = "trace.json",
    *,
    since_s: float = 0.0,
    until_s: float = math.inf,
    most: int = MOST,
) -> Trace:
    """Write one trace of all workers whose logs lie in `directory`.

    Args:
        directory: the run's log directory.
        output: the file; a name that ends with `.gz` is compressed.
        since_s: start of the drawn part, seconds from the start of the run.
        until_s: end of the drawn part, seconds from the start of the run.
        most: lines of the logs that are drawn one by one.

    Raises:
        LogError: there is no run.
    """
    runs, path = read_runs(directory), Path(output)
    for run in runs:
        run.workers = [worker for worker in run.workers if worker.attach]  # without it the start is unknown
    clocks = align_clocks(runs)
    workers = [worker for run in runs for worker in run.workers]
    begun = min((clocks.common(worker, 0.0) for worker in workers), default=0.0)
    window = (begun, begun + since_s, begun + until_s)
    folded = max(1, -(-sum(_inside(clocks, worker, window) for worker in workers) // most))
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        slices = _write(file, _all(runs, clocks, window, folded), _about(runs, clocks, folded))
    return Trace(path, len({worker.rank for worker in workers}), slices, folded, clocks.text)


def _write(file: TextIO, events: Iterable[TraceEvent], about: TraceEvent) -> int:
    """Write one event a line; returns the number of spans."""
    count, between = 0, "\n"
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [')
    for event in events:
        file.write(between + json.dumps(event, allow_nan=False))
        count, between = count + (event["ph"] == "X"), ",\n"
    file.write("\n]}\n")
    return count


def _about(runs: Sequence[RunLog], clocks: Clocks, folded: int) -> TraceEvent:
    lines = f"a span is {folded} lines of the log" if folded > 1 else "a span is a line of the log"
    return {"rule": runs[-1].rule, "version": runs[-1].version, "clock": clocks.text, "spans": lines}


def _inside(clocks: Clocks, worker: WorkerLog, window: Window) -> int:
    return sum(window[1] <= clocks.common(worker, line.at_s) <= window[2] for line in worker.exchanges)


def _all(runs: Sequence[RunLog], clocks: Clocks, window: Window, folded: int) -> Iterator[TraceEvent]:
    for run in runs:
        for worker in run.workers:
            yield from names(run, worker)
            for event in (*spans(run, worker, clocks, window, folded), *moments(run, worker, clocks, window)):
                if window[1] <= window[0] + event["ts"] / 1e6 <= window[2]:
                    yield event
