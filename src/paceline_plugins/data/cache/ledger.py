# SPDX-License-Identifier: Apache-2.0
"""The bytes that a cache directory holds and has reserved, agreed among all processes that share it.

The file `ledger` holds these numbers and is the directory's lock. A process that takes the lock reads the file and
spoils its first byte, and writes it anew before the release; if the process is killed or fails in between, the next one
finds no JSON and counts the directory's files. The file is padded, because to cut it takes longer than all the rest.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import CacheError
from paceline_plugins.data.cache.locks import FileLock, StallTimeout

GONE = (errno.ENOENT, errno.ENOTDIR)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
SPOILT = b"-"
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class SpaceUsage:
    """Bytes of complete files, and bytes reserved for running downloads by key (None: of unknown size)."""

    complete: int = 0
    claims: dict[str, int | None] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes used or reserved."""
        return self.complete + sum(size or 0 for size in self.claims.values())


class SpaceLedger:
    """The space usage of one directory; `count` counts its files, another process may hold its lock for `timeout_s`."""

    def __init__(self, directory: Path, count: Callable[[], SpaceUsage], timeout_s: float) -> None:
        self._path, self._count, self._timeout_s = directory / "ledger", count, timeout_s
        self._threads = threading.Lock()  # spares the threads of one process the polling
        self._counted = False

    @contextmanager
    def open(self) -> Iterator[SpaceUsage]:
        """The usage, to be read and changed; within the context no other process changes it or evicts.

        Raises:
            CacheError: the directory is gone or cannot be written, or another process holds the lock too long.
        """
        with self._threads, explained(self._path.parent):
            lock = FileLock(self._path)
            lock.acquire(StallTimeout(self._timeout_s, self._last_change, self._stuck))
            try:
                usage = self._read(lock.descriptor)
                os.pwrite(lock.descriptor, SPOILT, 0)
                yield usage
                self._write(lock.descriptor, usage)
            finally:
                lock.release()

    def _read(self, descriptor: int) -> SpaceUsage:
        text = os.pread(descriptor, 1 << 24, 0)
        if self._counted and text:
            with suppress(ValueError, KeyError, TypeError):
                found = json.loads(text)
                return SpaceUsage(int(found["complete"]), dict(found["claims"]))
        self._counted = True  # each process counts once, in case files were removed by hand
        return self._count()

    @staticmethod
    def _write(descriptor: int, usage: SpaceUsage) -> None:
        try:
            text = json.dumps({"complete": usage.complete, "claims": usage.claims}).encode()
            os.pwrite(descriptor, text.ljust(os.fstat(descriptor).st_size), 0)
        except OSError as error:
            if error.errno not in FULL:
                raise
            os.ftruncate(descriptor, 0)  # the next process counts

    def _last_change(self) -> object:
        return os.stat(self._path).st_mtime_ns

    def _stuck(self, waited_s: float) -> Exception:
        return CacheError(f"another process has kept the lock {self._path} for {waited_s:.0f} s; is it stopped?")


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turn an OSError about a cache directory into a CacheError that says what to do."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or directory}: {error.strerror}"
        if error.errno in GONE:
            raise CacheError(
                f"the cache directory {directory} has vanished ({what}); was it removed, or is a disk unmounted?"
            ) from error
        if error.errno in FORBIDDEN:
            raise CacheError(
                f"the cache directory {directory} cannot be written ({what}); give a directory of your own, as "
                "Cache(directory=...)"
            ) from error
        raise
