# SPDX-License-Identifier: Apache-2.0
"""File locks between processes and threads, which die with whoever holds them.

`flock` belongs to an open file, so two threads that open it twice exclude each other like two processes do, and the
kernel lets go when the last copy of the file is closed, also by SIGKILL. A lock file may be removed by its holder;
whoever waited on the removed one notices that the name has gone and begins again with the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from paceline.data.cache.regular_file import open_regular

SHORTEST_S, LONGEST_S = 0.001, 0.02
"""Between two looks at a lock that somebody else has."""

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """A lock on a path: shared among readers, or of one writer alone. Not for use by two threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """The open lock file; only while the lock is held."""
        assert self._descriptor is not None, "the lock is not held"
        return self._descriptor

    def try_acquire(self, *, shared: bool) -> bool:
        """Take the lock if that is possible at once.

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

    def acquire(self, *, shared: bool, patient: Callable[[], None]) -> None:
        """Take the lock; `patient` is called before every further look, and ends the wait by raising."""
        pause = SHORTEST_S
        while not self.try_acquire(shared=shared):
            patient()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)

    def share(self) -> None:
        """Let others read along. Not atomic: only while the directory's own lock keeps evictions away."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def release(self, *, remove: bool = False) -> None:
        """Let go, and take the lock file away if nobody needs it any more (only its single writer may say so)."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if remove:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        # Unlocking by hand, because a child process that was forked meanwhile has a copy of the open file.
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
