# SPDX-License-Identifier: Apache-2.0
"""Event logs in, plain objects out.

A run with a log directory leaves one file per worker, `rank-000.jsonl`, one JSON object a line; a
second `attach` of the same program leaves `rank-000.2.jsonl`. The reader is as tolerant as a
reader of a killed program's files must be: unknown kinds and fields are ignored, and a last line
that was cut off is counted and skipped. So is a line that is no event, and the report says so; a
file without a single event is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from paceline.core.printable import deeply
from paceline.errors import PacelineError
from paceline.observe.reports import elastic_events
from paceline.observe.reports.elastic_clock import align_logs
from paceline.observe.reports.events import (
    Cached,
    EpochEvent,
    ExchangeEvent,
    GenerationEvent,
    LeftOut,
    Lost,
    OtherEvent,
    SourceReads,
    Takeover,
    Tuned,
    Value,
)
from paceline.observe.reports.folding import Folding
from paceline.observe.reports.log import RunLog, WorkerLog

LOG_NAME = re.compile(r"rank-(\d+)(?:\.(\d+))?\.jsonl")

LONGEST_LINE = 1 << 22
NAMED = 3
"""Damaged lines whose numbers are told."""

MOMENTS = {
    "error": "message", "damaged": "why", "save": "path", "resume": "path", "waiting": "workers",
    "generation": "reason", "gave": "workers", "paused": "reason",
}  # fmt: skip
"""Events of which a reader wants to know when they were; what they say stands in the field named here."""


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
    """The only run in `directory`; where a program attached several times, the last one."""
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
            f"no worker's log (rank-000.jsonl, ...) lies in {directory}: start the program with "
            f"`paceline run --log {directory} ...`, or give the directory of a run that has logs"
        )
    for path in directory.iterdir():
        match = LOG_NAME.fullmatch(path.name)
        if match and path.is_file():  # whoever waits at a pipe waits for ever
            yield int(match[2] or 1), path


def read_worker(path: Path) -> WorkerLog:
    """One worker's file."""
    match = LOG_NAME.fullmatch(path.name)
    log = WorkerLog(path=path, rank=int(match[1]) if match else 0)
    taken, cut, folding = 0, False, Folding(log)
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), start=1):
            if not line.strip(b"\0 \t\r\n"):  # a file system that crashed fills up with zeros
                continue
            try:
                take(log, parse_line(line))
                taken += 1
                folding.look()
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                cut = not line.endswith(b"\n")
                log.truncated += cut
                if not cut:
                    log.damaged_lines += 1
                    log.damaged += [number] if len(log.damaged) < NAMED else []
    if not taken and log.damaged:
        raise LogError(
            f"{path}: none of its {log.damaged_lines} lines is an event of a run; remove the file to read the others"
        )
    return log


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """One after another, so that a file of any size takes little memory; of a line without end the beginning."""
    while line := file.readline(LONGEST_LINE):
        rest = line
        while len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE)
        yield line if rest is line else line + rest[-1:]


def parse_line(line: bytes) -> dict[str, Any]:
    """The event on one line; ValueError where there is none."""
    event = json.loads(line)
    if not isinstance(event, dict):
        raise ValueError(f"expected an object, got {type(event).__name__}")
    return event if line.isascii() and b"\\" not in line else dict(deeply(event))


def take(log: WorkerLog, event: dict[str, Any]) -> None:
    """Add one event to a worker's log."""
    kind, at_s = event.get("kind"), float(event.get("at_s", 0.0))
    if kind == "attach":
        log.attach = event
    elif kind == "epoch":
        batches = event.get("batches")
        log.epochs.append(EpochEvent(at_s, int(event.get("epoch", 0)), None if batches is None else int(batches)))
    elif kind == "exchange":
        log.exchanges.append(_exchange(at_s, event, log.generations[-1].number if log.generations else 0))
    elif kind == "value":
        log.values.append(_value(at_s, event))
    elif kind == "cache":
        line = _cached(at_s, event)
        log.caches[line.cache] = line
    elif kind == "lost":
        log.lost.append(_lost(at_s, event))
    elif kind == "left_out":
        log.left_out.append(_left_out(at_s, event))
    elif kind == "takeover":
        version, source = int(event.get("version", 0)), str(event.get("from", "unknown"))
        log.takeovers.append(Takeover(at_s, int(event["slice_of"]), version, source))
    elif kind == "tune":
        log.tuned.append(_tuned(at_s, event))
    elif kind == "generation":
        log.generations.append(GenerationEvent(at_s, int(event.get("number", 0)), int(event.get("size", 0))))
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
    if kind in MOMENTS:
        log.moments.append(_moment(at_s, str(kind), event))
    log.last_at_s = max(log.last_at_s, at_s)


def _exchange(at_s: float, event: dict[str, Any], generation: int) -> ExchangeEvent:
    return ExchangeEvent(
        at_s=at_s,
        block=int(event.get("block", 0)),
        exchanges=int(event.get("exchanges", 1)),
        minibatches=int(event.get("minibatches", 0)),
        total_minibatches=int(event.get("total_minibatches", 0)),
        samples=_count(event.get("samples")),
        total_samples=_count(event.get("total_samples")),
        compute_s=float(event.get("compute_s", 0.0)),
        wait_s=float(event.get("wait_s", 0.0)),
        exchange_s=float(event.get("exchange_s", 0.0)),
        bytes=int(event.get("bytes", 0)),
        left_out=tuple(int(rank) for rank in event.get("left_out") or ()),
        warmup=bool(event.get("warmup", False)),
        delays={int(delay): int(count) for delay, count in dict(event.get("delays") or {}).items()},
        refused=int(event.get("refused", 0)),
        data_s=_seconds(event.get("data_s")),
        met=_count(event.get("met")),
        met_s=_seconds(event.get("met_s")),
        generation=generation,
    )


def _cached(at_s: float, event: dict[str, Any]) -> Cached:
    return Cached(at_s, str(event["cache"]), {str(name): _source(row) for name, row in event["sources"].items()})


def _moment(at_s: float, kind: str, event: dict[str, Any]) -> OtherEvent:
    said = event.get(MOMENTS[kind], "")
    return OtherEvent(at_s, kind, said if isinstance(said, str) else json.dumps(said))


def _source(row: dict[str, Any]) -> SourceReads:
    return SourceReads(
        hits=int(row.get("hits", 0)),
        misses=int(row.get("misses", 0)),
        bytes=int(row.get("bytes", 0)),
        waited_s=float(row.get("waited_s", 0.0)),
        retries=int(row.get("retries", 0)),
        corrupt=int(row.get("corrupt", 0)),
    )


def _lost(at_s: float, event: dict[str, Any]) -> Lost:
    new_owners = tuple(int(rank) for rank in event.get("taken_over") or ())
    return Lost(at_s, int(event["rank_lost"]), str(event.get("why", "")), new_owners)


def _tuned(at_s: float, event: dict[str, Any]) -> Tuned:
    changes = {str(name): (before, after) for name, (before, after) in dict(event.get("changes") or {}).items()}
    return Tuned(
        at_s=at_s,
        by=int(event.get("by", 0)),
        block=int(event.get("block", 0)),
        total_minibatches=int(event.get("total_minibatches", 0)),
        changes=changes,
        revert=bool(event.get("revert", False)),
        refused=str(event.get("refused", "")),
        why=str(event.get("why", "")),
    )


def _left_out(at_s: float, event: dict[str, Any]) -> LeftOut:
    rank, in_a_row = int(event["rank_left_out"]), int(event.get("in_a_row", 1))
    return LeftOut(at_s, rank, str(event.get("why", "")), bool(event.get("finite", False)), in_a_row)


def _value(at_s: float, event: dict[str, Any]) -> Value:
    return Value(
        at_s=at_s,
        name=str(event["name"]),
        value=float(event["value"]),  # the log writes nan and inf as text, which float() reads
        total_minibatches=int(event.get("total_minibatches", 0)),
        total_samples=_count(event.get("total_samples")),
    )


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)
