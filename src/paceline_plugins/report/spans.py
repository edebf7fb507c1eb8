# SPDX-License-Identifier: Apache-2.0
"""One worker's log as trace events.

A process of the trace is a worker; its threads are its activities: compute, data, wait, exchange, and faults. A line of
a log has the duration of each since the line before, not their order: the trace draws data, compute, wait, exchange, as
in a block. Exchanges that follow each other within a quarter of a second share a line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.observe.reports.events import ExchangeEvent
from paceline.observe.reports.log import RunLog, WorkerLog
from paceline_plugins.report.clocks import Clocks

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
