# SPDX-License-Identifier: Apache-2.0
"""The event log: what happened, one JSON object a line, one file a worker.

`DIR/rank-000.jsonl` holds rank 0's events in the order in which they happened. Every event has `kind`, `at_s` (seconds
since the journal was opened, monotonic) and `rank`. The file is flushed at least once a second while events come, so
that it can be watched while the run goes on, and a killed worker loses at most its last second. Readers live in
:mod:`paceline.observe`.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any, TextIO

FLUSH_EVERY_S = 1.0


def log_name(rank: int, number: int) -> str:
    """File name of a worker's log; the second run of one program has `number` 2, and so on."""
    return f"rank-{rank:03d}.jsonl" if number <= 1 else f"rank-{rank:03d}.{number}.jsonl"


class Journal:
    """Writes one worker's events; without a directory it swallows them."""

    def __init__(self, directory: str | Path | None, rank: int) -> None:
        self.rank = rank
        self.path: Path | None = None
        self._file: TextIO | None = None
        self._started = time.perf_counter()
        self._flushed = self._started
        if directory is not None:
            self._open(Path(directory))

    def _open(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:  # two runs of one program, or of two programs, never write into one file
            path = directory / log_name(self.rank, number)
            with contextlib.suppress(FileExistsError):
                self._file = path.open("x", encoding="utf-8")
                self.path = path
                return
            number += 1

    @property
    def at_s(self) -> float:
        """Seconds since the journal was opened."""
        return time.perf_counter() - self._started

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. NaN and infinities become strings, because JSON has no word for them."""
        if self._file is None:
            return
        event = {"kind": kind, "at_s": round(self.at_s, 6), "rank": self.rank, **fields}
        try:
            line = json.dumps(event, allow_nan=False)
        except ValueError:
            line = json.dumps({k: _sayable(v) for k, v in event.items()})
        self._file.write(line + "\n")
        now = time.perf_counter()
        if now - self._flushed >= FLUSH_EVERY_S or kind not in ("value", "exchange"):
            self._file.flush()
            self._flushed = now

    def close(self) -> None:
        """Flush and close; later events are swallowed."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _sayable(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
