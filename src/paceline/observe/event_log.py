# SPDX-License-Identifier: Apache-2.0
"""The event log: what happened, one JSON object a line, one file a worker.

`DIR/rank-000.jsonl` holds rank 0's events in the order in which they happened. Every event has `kind`, `at_s` (seconds
since the journal was opened, monotonic) and `rank`. The file is flushed at least once a second while events come, so
that it can be watched while the run goes on, and a killed worker loses at most its last second. A full disk or a
directory that was removed is one warning, and the run goes on (:mod:`.event_file`). Readers live in
:mod:`paceline.observe`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from paceline.errors import UnsupportedError
from paceline.observe.event_file import EventFile

FLUSH_EVERY_S = 1.0
FLUSH_BYTES = 1 << 16


def log_name(rank: int, number: int) -> str:
    """File name of a worker's log; the second run of one program has `number` 2, and so on."""
    return f"rank-{rank:03d}.jsonl" if number <= 1 else f"rank-{rank:03d}.{number}.jsonl"


class EventLog:
    """Writes one worker's events; without a directory it swallows them.

    Raises:
        UnsupportedError: no file can be made in the directory.
    """

    def __init__(self, directory: str | Path | None, rank: int) -> None:
        self.rank = rank
        self._file: EventFile | None = None
        self._closed = False
        self._started = time.perf_counter()
        self._flushed = self._started
        if directory is None:
            return
        home = Path(directory)
        try:
            self._file = EventFile(lambda: _new(home, rank), f"the event log of worker {rank} in {home}")
        except OSError as error:
            raise UnsupportedError(
                f"no event log can be written in {home}: {error.strerror or error}; give another directory (log=, or "
                "--log of paceline run), or none"
            ) from error

    @property
    def path(self) -> Path | None:
        """Of the file; None where there is none."""
        return None if self._file is None else self._file.path

    @property
    def at_s(self) -> float:
        """Seconds since the journal was opened."""
        return time.perf_counter() - self._started

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. NaN and infinities become strings, because JSON has no word for them."""
        if self._file is None or self._closed:
            return
        event = {"kind": kind, "at_s": round(self.at_s, 6), "rank": self.rank, **fields}
        try:
            line = json.dumps(event, allow_nan=False)
        except ValueError:
            line = json.dumps({k: _sayable(v) for k, v in event.items()})
        self._file.add(line)
        now = time.perf_counter()
        due = now - self._flushed >= FLUSH_EVERY_S or self._file.waiting_bytes >= FLUSH_BYTES
        if due or kind not in ("value", "exchange"):
            self._file.flush()
            self._flushed = now

    def close(self) -> None:
        """Flush and close; later events are swallowed."""
        if self._file is not None and not self._closed:
            self._closed = True
            self._file.close()


def _new(directory: Path, rank: int) -> tuple[int, Path]:
    """A file of one's own: two runs of one program, or of two programs, never write into one."""
    directory.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = directory / log_name(rank, number)
        try:
            return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path
        except FileExistsError:
            number += 1


def _sayable(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
