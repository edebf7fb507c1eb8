# SPDX-License-Identifier: Apache-2.0
"""The event log: what happened, one JSON object a line, one file a worker.

`DIR/rank-000.jsonl` holds rank 0's events in order. Every event has `kind`, `at_s` (seconds since the log was opened,
monotonic) and `rank`. The file is flushed at least once a second while events come, so that `paceline watch` can follow
it, and a killed worker loses at most its last second. A full disk or a removed directory gives one warning, and the run
goes on (:mod:`.event_file`). Readers are in :mod:`paceline.observe.reports`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UnsupportedError
from paceline.observe.event_file import EventFile

ATTACHED = ".attached"
"""A file in the log directory: a worker has attached. Without attaching, each of N copies of a program does all of the
job, and the launcher says so."""
FLUSH_EVERY_S = 1.0
FLUSH_BYTES = 1 << 16


def log_name(rank: int, number: int) -> str:
    """File name of a worker's log; the second run of one program has `number` 2, and so on."""
    return f"rank-{rank:03d}.jsonl" if number <= 1 else f"rank-{rank:03d}.{number}.jsonl"


class EventLog:
    """Writes one worker's events; without a directory it discards them.

    Raises:
        UnsupportedError: no file can be made in the directory.
    """

    def __init__(self, directory: str | Path | None, rank: int) -> None:
        self.rank = rank
        self._file: EventFile | None = None
        self._closed = False
        self._started = self._flushed = time.perf_counter()
        if directory is None:
            return
        folder = Path(directory)
        try:
            self._file = EventFile(lambda: _new_file(folder, rank), f"the event log of worker {rank} in {folder}")
        except OSError as error:
            raise UnsupportedError(
                f"no event log can be written in {folder}: {error.strerror or error}; give another directory (log=, or "
                "--log of paceline run), or none"
            ) from error

    @property
    def path(self) -> Path | None:
        """The file; None without one."""
        return None if self._file is None else self._file.path

    @property
    def at_s(self) -> float:
        """Seconds since the log was opened."""
        return time.perf_counter() - self._started

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. NaN and infinities become strings, because JSON has no number for them."""
        if self._file is None or self._closed:
            return
        event = {"kind": kind, "at_s": round(self.at_s, 6), "rank": self.rank, **fields}
        try:
            line = json.dumps(event, allow_nan=False)
        except ValueError:
            finite = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
            line = json.dumps(finite)
        self._file.add(line)
        now = time.perf_counter()
        due = now - self._flushed >= FLUSH_EVERY_S or self._file.waiting_bytes >= FLUSH_BYTES
        if due or kind not in ("value", "exchange"):
            self._file.flush()
            self._flushed = now

    def close(self) -> None:
        """Flush and close; later events are discarded."""
        if self._file is not None and not self._closed:
            self._closed = True
            self._file.close()


def mark_attached(directory: str | Path) -> None:
    """Tell the launcher that this process attaches."""
    with contextlib.suppress(OSError):  # a full or removed directory must not end a run
        Path(directory, ATTACHED).touch()


def nothing_attached(directory: Path) -> bool:
    """Whether the directory exists without that file and without an event log; one that was removed is made again."""
    return directory.is_dir() and not (directory / ATTACHED).exists() and not any(directory.glob("rank-*.jsonl"))


def _new_file(directory: Path, rank: int) -> tuple[int, Path]:
    """Create a file that no other run writes to."""
    directory.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = directory / log_name(rank, number)
        try:
            return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path
        except FileExistsError:
            number += 1


# Which process wrote a log, and whether it still runs: its id and its start time, in one namespace of process ids.


def this_process() -> dict[str, Any]:
    """This process, for a log."""
    return {"pid": os.getpid(), "began": _start_ticks(os.getpid()), "space": _pid_namespace()}


def is_gone(host: str, about: Mapping[str, Any]) -> bool:
    """Whether the process that a log on `host` names has certainly ended; False where this host cannot tell."""
    pid, began, space = (about.get(name) for name in ("pid", "began", "space"))
    if not (isinstance(pid, int) and isinstance(began, int) and began and space):
        return False
    return host == socket.gethostname() and space == _pid_namespace() and _start_ticks(pid) != began


def _start_ticks(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 where none runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def _pid_namespace() -> str:
    """A container's or a booted host's; "" where the system does not say."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{os.readlink('/proc/self/ns/pid')} {boot_id}"
    except OSError:
        return ""
