# SPDX-License-Identifier: Apache-2.0
"""File locks between processes and threads, which the kernel releases when their holder dies.

`flock` belongs to an open file, so two threads that open it twice exclude each other as two processes do, and the
kernel releases the lock when the last copy of the file is closed, also by SIGKILL. The holder may remove the lock
file; a process that waited on the removed file notices it and starts again with the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from paceline_plugins.data.cache.regular_file import open_regular

SHORTEST_S, LONGEST_S = 0.001, 0.02
"""Of a pause between two looks."""


class StallTimeout:
    """Pauses between looks, and raises when there was no progress for too long.

    Args:
        timeout_s: how long is too long.
        progress: a value that changes with progress, such as the size of a download; may raise OSError.
        error: makes the error, from the seconds waited.
        news: ends a pause when it is notified; other processes cannot do that.
    """

    def __init__(
        self,
        timeout_s: float,
        progress: Callable[[], object],
        error: Callable[[float], Exception],
        news: threading.Condition | None = None,
    ) -> None:
        self._news = news or threading.Condition()
        self._timeout_s, self._progress, self._error = timeout_s, progress, error
        self._seen: object = None
        self._since = time.monotonic()
        self._pause_s = SHORTEST_S

    def wait(self) -> None:
        """Sleep before the next look, longer each time, or raise."""
        try:
            seen = self._progress()
        except OSError:
            seen = None
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > self._timeout_s:
            raise self._error(now - self._since)
        with self._news:
            self._news.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_S)


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """A shared or exclusive lock on a path. Not for use by two threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """The open lock file; only while the lock is held."""
        assert self._descriptor is not None, "the lock is not held"
        return self._descriptor

    def try_acquire(self, *, shared: bool) -> bool:
        """Take the lock unless another holder excludes it.

        Raises:
            CacheError: the path is a link.
            OSError: the directory is gone or may not be written.
        """
        flag = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        while True:
            descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, flag | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            except BaseException:
                os.close(descriptor)
                raise
            if _is_at(descriptor, self.path):
                self._descriptor = descriptor
                _held.add(self)
                return True
            os.close(descriptor)  # it was removed between open and flock

    def acquire(self, stall_timeout: StallTimeout) -> None:
        """Take the lock exclusively; `stall_timeout` ends the wait by raising."""
        while not self.try_acquire(shared=False):
            stall_timeout.wait()

    def share(self) -> None:
        """From exclusive to shared. Not atomic: only while the directory's lock prevents evictions."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def release(self, *, remove: bool = False) -> None:
        """Release the lock; with `remove`, which only its exclusive holder may give, delete the lock file."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if remove:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        # Closing is not enough: a child forked meanwhile has a copy of the open file.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: the lock stays with the parent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)
