# SPDX-License-Identifier: Apache-2.0
"""Reads log files into `RunLog`.

A run with a log directory leaves one file per worker, `rank-000.jsonl`, one JSON object a line; a second `attach` of
the same program leaves `rank-000.2.jsonl`. A killed program may leave damaged files: unknown kinds and fields are
ignored, and a last line that was cut off is counted and skipped. Other lines that are no events are skipped and
reported; a file without a single event is an error.

A log of any length fits into bounded memory: exchanges are merged in pairs, of reported values every second one is
kept. Totals stay exact; curves keep more points than a figure can show.

Each log counts from its own beginning. The workers of an elastic run join one after another; two logs are aligned by
exchanges in which both workers took part, or else by a generation of which both were members, or else by the clocks of
their hosts. The run begins with its first worker's log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import IO, Any

from paceline.errors import PacelineError
from paceline.observe.reports import elastic_events
from paceline.observe.reports.elastic_events import ControlEvent
from paceline.observe.reports.events import (
    LONGEST_LINE,
    EpochEvent,
    ExchangeEvent,
    GenerationEvent,
    LeftOut,
    Lost,
    Takeover,
    Tuned,
    Value,
    from_json,
    parse_line,
)
from paceline.observe.reports.log import RunLog, WorkerLog
from paceline.observe.reports.notices import worker_notice

LOG_NAME = re.compile(r"rank-(\d+)(?:\.(\d+))?\.jsonl")

MOST_DAMAGED = 3
"""Damaged lines whose numbers are kept."""


class LogError(PacelineError, ValueError):
    """A log directory or one of its files cannot be read as a run."""


def read_runs(directory: str | Path) -> list[RunLog]:
    """All runs whose logs lie in `directory`, in the order of their numbers."""
    home = Path(directory)
    groups: dict[int, list[WorkerLog]] = {}
    for number, path in sorted(_log_files(home)):
        groups.setdefault(number, []).append(read_worker(path))
    runs = [RunLog(home, n, sorted(logs, key=lambda w: w.rank)) for n, logs in groups.items()]
    if runs:
        runs[-1].events = elastic_events.read_events(home)
    for run in runs:
        align_logs(run)
        run.label = home.resolve().name + (f" ({run.number})" if len(runs) > 1 else "")
    return runs


def read_run(directory: str | Path) -> RunLog:
    """The run in `directory`; where a program attached several times, the last one."""
    return read_runs(directory)[-1]


def has_run(directory: Path) -> bool:
    """Whether `directory` holds any worker's log."""
    return directory.is_dir() and any(LOG_NAME.fullmatch(p.name) and p.is_file() for p in directory.iterdir())


def _log_files(directory: Path) -> Iterator[tuple[int, Path]]:
    if not directory.is_dir():
        kind = "is a file, not a directory" if directory.exists() else "does not exist"
        raise LogError(f"{directory} {kind}: give the log directory of a run, the one --log named")
    if not has_run(directory):
        raise LogError(
            f"no worker's log (rank-000.jsonl, ...) lies in {directory}: its program ended before it attached "
            f"(see {directory / 'output'}), or give the directory of another run"
        )
    for path in directory.iterdir():
        match = LOG_NAME.fullmatch(path.name)
        if match and path.is_file():  # opening a pipe would block
            yield int(match[2] or 1), path


def read_worker(path: Path) -> WorkerLog:
    """One worker's file."""
    match = LOG_NAME.fullmatch(path.name)
    log = WorkerLog(path=path, rank=int(match[1]) if match else 0)
    events, folding = 0, Folding(log)
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), start=1):
            if not line.strip(b"\0 \t\r\n"):  # a crashed file system leaves zeros
                continue
            try:
                add_event(log, parse_line(line))
                events += 1
                folding.after_event()
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                cut = not line.endswith(b"\n")
                log.truncated += cut
                if not cut:
                    log.damaged_lines += 1
                    log.damaged += [number] if len(log.damaged) < MOST_DAMAGED else []
    if not events and log.damaged:
        raise LogError(
            f"{path}: none of its {log.damaged_lines} lines is an event of a run; remove the file to read the others"
        )
    return log


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Line by line, in bounded memory; of a line that is too long the beginning."""
    while line := file.readline(LONGEST_LINE):
        rest = line
        while len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE)
        yield line if rest is line else line + rest[-1:]


def add_event(log: WorkerLog, event: dict[str, Any]) -> None:
    """Add one event to a worker's log."""
    kind, at_s = event.get("kind"), float(event.get("at_s", 0.0))
    if kind == "attach":
        log.attach = event
    elif kind == "rule":
        log.attach = {**log.attach, "chosen_rule": event["rule"], "why": event.get("why", "")}
    elif kind == "epoch":
        log.epochs.append(from_json(EpochEvent, event, at_s=at_s))
    elif kind == "exchange":
        generation = log.generations[-1].number if log.generations else 0
        log.exchanges.append(from_json(ExchangeEvent, event, at_s=at_s, generation=generation))
    elif kind == "value":
        log.values.append(from_json(Value, event, at_s=at_s))
    elif kind == "lost":
        log.lost.append(from_json(Lost, event, at_s=at_s, rank=int(event["rank_lost"])))
    elif kind == "left_out":
        log.left_out.append(from_json(LeftOut, event, at_s=at_s, rank=int(event["rank_left_out"])))
    elif kind == "takeover":
        source = str(event.get("from", "unknown"))
        log.takeovers.append(from_json(Takeover, event, at_s=at_s, source=source))
    elif kind == "tune":
        changes = {str(name): (before, after) for name, (before, after) in dict(event.get("changes") or {}).items()}
        log.tuned.append(from_json(Tuned, event, at_s=at_s, changes=changes))
    elif kind == "generation":
        log.generations.append(from_json(GenerationEvent, event, at_s=at_s))
    elif kind == "turn":
        log.turn = int(event["turn"]), max(1, int(event["turns"]))
    elif kind == "gap":
        log.gaps += int(event.get("events", 0))
    elif kind == "save":
        log.saves += 1
    elif kind == "resume":
        log.resumes += 1
    elif kind == "error":
        log.errors.append(str(event.get("message", "")))
    elif kind == "close":
        log.closed = event
    log.notices.add(worker_notice(log.rank, event, at_s))
    log.last_at_s = max(log.last_at_s, at_s)


MOST_LINES = 50_000
MOST_REPORTS = 200_000
SUMS = ("exchanges", "minibatches", "compute_s", "wait_s", "exchange_s", "bytes", "left_out", "refused")
OPTIONAL_SUMS = ("samples", "data_s")


class Folding:
    """Keeps one worker's log short while it is read.

    Args:
        log: of the worker.
        most_lines: exchanges that are kept, up to twice as many; None: enough for all figures.
        most_reports: the same of reported values.
    """

    def __init__(self, log: WorkerLog, most_lines: int | None = None, most_reports: int | None = None) -> None:
        self._log = log
        self._most_lines, self._most_reports = most_lines or MOST_LINES, most_reports or MOST_REPORTS
        self._every, self._seen = 1, Counter[str]()
        self._last: Value | None = None

    def after_event(self) -> None:
        """Fold the log where it has become too long."""
        log = self._log
        if len(log.exchanges) > 2 * self._most_lines:
            log.exchanges = merge_pairs(log.exchanges)
        if log.values and self._every > 1 and log.values[-1] is not self._last:
            name = log.values[-1].name
            self._seen[name] += 1
            if self._seen[name] % self._every:
                log.values.pop()
        if len(log.values) > 2 * self._most_reports:
            self._thin()
        self._last = log.values[-1] if log.values else None

    def _thin(self) -> None:
        """Keep every second report of each name."""
        seen, kept = Counter[str](), []
        for value in self._log.values:
            seen[value.name] += 1
            if seen[value.name] % 2 == 0:
                kept.append(value)
        self._seen = Counter({name: max(self._seen[name], count * self._every) for name, count in seen.items()})
        self._every, self._log.values = 2 * self._every, kept


def merge_pairs(lines: list[ExchangeEvent]) -> list[ExchangeEvent]:
    """Each two lines of one generation as one."""
    merged: list[ExchangeEvent] = []
    rest = list(reversed(lines))
    while rest:
        first = rest.pop()
        merged.append(merge(first, rest.pop()) if rest and rest[-1].generation == first.generation else first)
    return merged


def merge(first: ExchangeEvent, second: ExchangeEvent) -> ExchangeEvent:
    """Two successive lines as one."""
    sums = {name: getattr(first, name) + getattr(second, name) for name in SUMS}
    for name in OPTIONAL_SUMS:
        known = [value for value in (getattr(first, name), getattr(second, name)) if value is not None]
        sums[name] = sum(known) if known else None
    met = first if second.met is None else second
    return replace(
        second,
        **sums,
        total_samples=first.total_samples if second.total_samples is None else second.total_samples,
        warmup=first.warmup and second.warmup,
        delays=dict(Counter(first.delays) + Counter(second.delays)),
        met=met.met,
        met_s=met.met_s,
    )


Marks = dict[tuple[int, int], float]
"""(generation, number of an exchange in it; 0 for the beginning) -> when it was."""


def align_logs(run: RunLog) -> None:
    """Set `began_s` of the workers of an elastic run, and the times of its events; other workers begin together."""
    elastic = sorted((worker for worker in run.workers if worker.generations), key=_joining_order)
    if not elastic:
        return
    known: Marks = {}
    first = elastic[0]
    for worker in elastic:
        worker.began_s = _began(worker, _marks(worker), known, first)
        for key, at_s in _marks(worker).items():
            known.setdefault(key, worker.began_s + at_s)
    start = min(worker.began_s for worker in elastic)
    for worker in elastic:
        worker.began_s -= start
    begun = {generation: at_s - start for (generation, exchange), at_s in known.items() if not exchange}
    run.events = _shifted(run.events, begun)


def _joining_order(worker: WorkerLog) -> tuple[int, float]:
    return worker.generations[0].number, float(worker.attach.get("unix_s", 0.0))


def _marks(worker: WorkerLog) -> Marks:
    marks = {(one.number, 0): one.at_s for one in worker.generations}
    met = ((line.generation, line.met, line.met_s) for line in worker.exchanges)
    return marks | {(number, met): at_s for number, met, at_s in met if number and met and at_s is not None}


def _began(worker: WorkerLog, own: Marks, known: Mapping[tuple[int, int], float], first: WorkerLog) -> float:
    if worker is first:
        return 0.0
    shared = own.keys() & known.keys()
    offsets = [known[key] - own[key] for key in shared if key[1]] or [known[key] - own[key] for key in shared]
    return median(offsets) if offsets else worker.log_start_unix_s - first.log_start_unix_s


def _shifted(events: Iterable[ControlEvent], begun: Mapping[int, float]) -> list[ControlEvent]:
    """The control plane's events on the workers' clock."""
    events = list(events)
    ahead = [
        begun[number] - event.at_s
        for event in events
        if event.kind == "generation" and (number := int(event.facts["number"])) in begun
    ]
    return [replace(event, at_s=event.at_s + median(ahead)) for event in events] if ahead else events
