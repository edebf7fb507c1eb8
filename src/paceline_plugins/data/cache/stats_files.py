# SPDX-License-Identifier: Apache-2.0
"""Where the copies of a `Cache` in other processes put their counts, so that the original can add them up.

The cache directory has a folder `counts` with a folder for each original Cache. There every copy (forked, or sent to
another process) has a file of one record for each source, overwritten at every change, so that it is up to date even
when its process is killed. Files are numbered by descent: `2` is a copy of the original, `2.0` a copy of that, and a
process adds up the files whose name begins with its own. A file is locked while its process lives; a new copy takes
over the file of a dead one, so there are never more files than concurrent processes. The original holds a lock beside
the folder and removes the folder when it closes; if it was killed, the next original removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
import time
import uuid
from dataclasses import astuple
from itertools import count
from pathlib import Path
from typing import TypeAlias

from paceline_plugins.data.cache.locks import FileLock
from paceline_plugins.data.cache.stats import Stats, added

NUMBERS = struct.Struct("<qqqdqq")
RECORD_BYTES = 512
"""The numbers, then the name of the source, padded with zero bytes."""
SWEEP_AFTER_S = 60.0
"""Younger folders are not swept, so that processes that start together do not disturb each other."""
TRIES = 10

StatsFileName: TypeAlias = tuple[str, str]
"""The folder, and the number of the file in it; "" is the original Cache, which needs no file."""


class StatsFile:
    """The counts of one process; made by `of_original` and `of_copy`.

    No method raises: a process that cannot write, as on a full disk, has no lock and counts for itself alone.
    """

    def __init__(self, folder: Path, number: str, lock: FileLock | None) -> None:
        self._folder, self.number, self._lock = folder, number, lock
        self._process, self._threads = os.getpid(), threading.RLock()
        self._rows: dict[str, int] = {}
        self._inherited = _read(folder / number) if number else {}  # from the dead process that had this file
        self._before = self._sum()
        self._last: dict[str, Stats] | None = None

    @classmethod
    def of_original(cls, directory: Path) -> StatsFile:
        """For a Cache that is no copy, in this directory."""
        counts = directory / "counts"
        folder = counts / uuid.uuid4().hex
        lock = FileLock(folder.with_suffix(".lock"))
        with contextlib.suppress(OSError):
            _sweep(counts)
        for _ in range(TRIES):  # another process may remove the empty `counts` at this moment
            with contextlib.suppress(OSError):
                counts.mkdir(parents=True, exist_ok=True)
                if lock.try_acquire(shared=False):
                    folder.mkdir()
                    return cls(folder, "", lock)
        return cls(folder, "", None)

    @classmethod
    def of_copy(cls, directory: Path, parent: StatsFileName) -> StatsFile:
        """For a copy of a Cache; an original where that has closed."""
        folder, above = directory / "counts" / parent[0], parent[1]
        with contextlib.suppress(OSError):
            for child in count():
                number = f"{above}.{child}" if above else str(child)
                lock = FileLock(folder / number)
                if lock.try_acquire(shared=False):
                    return cls(folder, number, lock)
        return cls.of_original(directory)

    @property
    def name(self) -> StatsFileName:
        """For `of_copy` in the copies."""
        return self._folder.name, self.number

    def write(self, source: str, stats: Stats) -> None:
        """Write what this process has counted so far."""
        if not self.number or self._process != os.getpid():
            return
        with self._threads, contextlib.suppress(OSError):  # such as a full disk
            if self._lock is None:
                return
            total = stats.plus(self._inherited.get(source, Stats()))
            record = NUMBERS.pack(*astuple(total))
            if source not in self._rows:
                known = list(dict.fromkeys([*self._inherited, *self._rows]))
                self._rows[source] = known.index(source) if source in known else len(known)
                record = (record + source.encode())[:RECORD_BYTES].ljust(RECORD_BYTES, b"\0")
            os.pwrite(self._lock.descriptor, record, self._rows[source] * RECORD_BYTES)

    def of_copies(self) -> dict[str, Stats]:
        """The sum over the copies of this one, and their copies."""
        if self._last is not None:
            return self._last
        since = {source: stats.plus(self._before.get(source, Stats()), -1) for source, stats in self._sum().items()}
        return {source: stats for source, stats in since.items() if stats != Stats()}

    def _sum(self) -> dict[str, Stats]:
        start = f"{self.number}." if self.number else ""
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(self._folder) if name.startswith(start)]
        return added(_read(self._folder / name) for name in names)

    def close(self) -> None:
        """Release the file; the original removes the folder, and remembers the sum."""
        if self._process != os.getpid():
            return
        with self._threads:
            if self._lock is None:
                return
            self._last = self.of_copies()
            if not self.number:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.release(remove=not self.number)
            self._lock = None
            if not self.number:
                with contextlib.suppress(OSError):
                    self._folder.parent.rmdir()  # unless other originals are in it


def _read(path: Path) -> dict[str, Stats]:
    """The counts in a file."""
    try:
        raw = path.read_bytes()
    except OSError:
        return {}
    found = {}
    for begin in range(0, len(raw) - RECORD_BYTES + 1, RECORD_BYTES):
        record = raw[begin : begin + RECORD_BYTES]
        source = record[NUMBERS.size :].rstrip(b"\0").decode("utf-8", errors="replace")
        if source:
            found[source] = Stats(*NUMBERS.unpack_from(record))
    return found


def _sweep(counts: Path) -> None:
    """Remove the folders of killed originals."""
    if not counts.is_dir():
        return
    for path in list(counts.glob("*.lock")):
        lock = FileLock(path)
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > SWEEP_AFTER_S and lock.try_acquire(shared=False):
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                lock.release(remove=True)
