# SPDX-License-Identifier: Apache-2.0
"""How many bytes a cache directory holds and has promised, agreed among all processes that share it.

The accounts are a few numbers in the file `ledger`, which is the directory's lock as well. Whoever takes the lock
reads them and empties the file, and writes them back when it lets go; so if it is killed in between, or meets an
error, the next one finds the file empty and counts what is there.
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

from paceline.data.cache.locks import FileLock
from paceline.data.cache.stall_timeout import StallTimeout
from paceline.errors import CacheError

GONE = (errno.ENOENT, errno.ENOTDIR)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class SpaceUsage:
    """Bytes of complete files; and bytes promised to downloads under way, by key (None: nobody knows how many)."""

    complete: int = 0
    claims: dict[str, int | None] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes that are taken or promised."""
        return self.complete + sum(size or 0 for size in self.claims.values())


class SpaceLedger:
    """The accounts of one directory.

    Args:
        directory: of the cache.
        count: counts what is there.
        timeout_s: how long to wait for another process, which keeps the lock for some milliseconds.
    """

    def __init__(self, directory: Path, count: Callable[[], SpaceUsage], timeout_s: float) -> None:
        self._path, self._count, self._timeout_s = directory / "ledger", count, timeout_s
        self._threads = threading.Lock()  # spares the threads of one process the polling
        self._counted = False

    @contextmanager
    def open(self) -> Iterator[SpaceUsage]:
        """The accounts, to be read and changed; nobody else has them meanwhile, and nothing is evicted by others.

        Raises:
            CacheError: the directory is gone or cannot be written, or somebody keeps the lock.
        """
        with self._threads, told(self._path.parent):
            lock = FileLock(self._path)
            lock.acquire(shared=False, patient=StallTimeout(self._timeout_s, self._seen, self._stuck))
            try:
                accounts = self._read(lock.descriptor)
                os.ftruncate(lock.descriptor, 0)
                yield accounts
                self._write(lock.descriptor, accounts)
            finally:
                lock.release()

    def _read(self, descriptor: int) -> SpaceUsage:
        text = os.pread(descriptor, 1 << 24, 0)
        if self._counted and text:
            with suppress(ValueError, KeyError, TypeError):
                found = json.loads(text)
                return SpaceUsage(int(found["complete"]), dict(found["claims"]))
        self._counted = True  # each process counts once, in case somebody has tidied up by hand
        return self._count()

    @staticmethod
    def _write(descriptor: int, accounts: SpaceUsage) -> None:
        text = json.dumps({"complete": accounts.complete, "claims": accounts.claims})
        try:
            os.pwrite(descriptor, text.encode(), 0)
        except OSError as error:
            if error.errno not in FULL:
                raise
            os.ftruncate(descriptor, 0)  # the next one counts

    def _seen(self) -> object:
        return os.stat(self._path).st_mtime_ns

    def _stuck(self, waited_s: float) -> Exception:
        return CacheError(f"another process has kept the lock {self._path} for {waited_s:.0f} s; is it stopped?")


@contextmanager
def told(directory: Path) -> Iterator[None]:
    """Say in plain words what is wrong with a cache directory."""
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
