# SPDX-License-Identifier: Apache-2.0
"""Where the copies of a `Cache` in other processes put their counts, so that the first one can add them up.

The directory of the cache has a folder `counts`, and in it one for each Cache that a program makes. There every copy
(forked, or sent to another process) has a sheet: a small file of one record for each source, written over at every
change, and so never behind, whatever becomes of the process. Sheets are numbered as copies of copies are: `2` is a
copy of the first, `2.0` a copy of that, and a process adds up those whose name begins with its own. A sheet is locked
as long as its process lives; a new copy goes on with the sheet of a dead one, so there are never more of them than
processes side by side. The folder goes with the Cache that it belongs to, which keeps a lock beside it, or, if that was
killed, when another one is made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from paceline.data.cache.locks import FileLock
from paceline.data.cache.stats import Stats, added

NUMBERS = struct.Struct("<qqqdqq")
RECORD_BYTES = 512
"""The numbers, then the name of the source, filled up with zero bytes."""
SWEEP_AFTER_S = 60.0
"""Whoever has begun since then is let alone, so that many that begin together do not disturb each other."""
TRIES = 10

StatsFileName: TypeAlias = tuple[str, str]
"""The folder, and the number of the sheet in it; "" is the first Cache, which needs no sheet."""


class StatsFile:
    """Where one process counts; made by `of_first` and `of_copy`.

    Nothing here raises: without a place to write, as on a full disk, a process counts for itself alone.

    Args:
        folder: of all sheets that belong together.
        number: of this one.
        lock: on the sheet, or on the folder by its owner; None: nothing can be written.
    """

    def __init__(self, folder: Path, number: str, lock: FileLock | None) -> None:
        self._folder, self.number, self._lock = folder, number, lock
        self._process, self._threads = os.getpid(), threading.RLock()
        self._places: dict[str, int] = {}
        self._mine = _read(folder / number) if number else {}  # of a dead process, whose sheet this was
        self._before = self._sum()
        self._last: dict[str, Stats] | None = None

    @classmethod
    def of_first(cls, directory: Path) -> StatsFile:
        """For a Cache that is no copy, in this directory."""
        counts = directory / "counts"
        folder = counts / uuid.uuid4().hex
        lock = FileLock(folder.with_suffix(".lock"))
        with contextlib.suppress(OSError):
            _sweep(counts)
        for _ in range(TRIES):  # others may remove `counts` at this moment because it is empty
            with contextlib.suppress(OSError):
                counts.mkdir(parents=True, exist_ok=True)
                if lock.try_acquire(shared=False):
                    folder.mkdir()
                    return cls(folder, "", lock)
        return cls(folder, "", None)

    @classmethod
    def of_copy(cls, directory: Path, parent: StatsFileName) -> StatsFile:
        """For a copy of a Cache; where nobody is left to read what it counts, as `of_first`."""
        folder, above = directory / "counts" / parent[0], parent[1]
        with contextlib.suppress(OSError):
            for number in _numbers(above):
                lock = FileLock(folder / number)
                if lock.try_acquire(shared=False):
                    return cls(folder, number, lock)
        return cls.of_first(directory)

    @property
    def name(self) -> StatsFileName:
        """For copies, which put it into `of_copy`."""
        return self._folder.name, self.number

    def put(self, source: str, stats: Stats) -> None:
        """Write what this process has counted so far."""
        if not self.number or self._process != os.getpid():
            return
        with self._threads, contextlib.suppress(OSError):  # such as a full disk
            if self._lock is None:
                return
            mine = self._mine.get(source)
            record = _packed(stats if mine is None else stats.plus(mine))
            place = self._places.get(source)
            if place is None:
                place = self._place(source)
                record = (record + source.encode())[:RECORD_BYTES].ljust(RECORD_BYTES, b"\0")
            os.pwrite(self._lock.descriptor, record, place * RECORD_BYTES)

    def _place(self, source: str) -> int:
        known = list(dict.fromkeys([*self._mine, *self._places]))
        self._places[source] = known.index(source) if source in known else len(known)
        return self._places[source]

    def of_copies(self) -> dict[str, Stats]:
        """The sum of what the copies of this one have counted, and their copies."""
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
        """Let go of it; the first Cache takes everything away, and remembers the sum."""
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
                    self._folder.parent.rmdir()  # unless others are there


def _numbers(above: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{above}.{number}" if above else str(number)
        number += 1


def _packed(stats: Stats) -> bytes:
    return NUMBERS.pack(stats.hits, stats.misses, stats.fetched_bytes, stats.waited_s, stats.retries, stats.corrupt)


def _read(path: Path) -> dict[str, Stats]:
    """What stands on a sheet."""
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
    """Take away the folders of those who were killed."""
    if not counts.is_dir():
        return
    for path in list(counts.glob("*.lock")):
        lock = FileLock(path)
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > SWEEP_AFTER_S and lock.try_acquire(shared=False):
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                lock.release(remove=True)
