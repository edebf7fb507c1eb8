# SPDX-License-Identifier: Apache-2.0
"""`write_trace`: the logs of all workers as one timeline, in the trace event format that Perfetto opens.

:mod:`.spans` makes the events.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from paceline.observe.reports.log import RunLog, WorkerLog
from paceline.observe.reports.read import read_runs
from paceline_plugins.report.clocks import Clocks, align_clocks
from paceline_plugins.report.spans import TraceEvent, Window, moments, names, spans

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
