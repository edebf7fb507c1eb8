# SPDX-License-Identifier: Apache-2.0
"""Appends whole lines to a file; the writer goes on when the disk is full or the file is removed.

Lines that cannot be written wait in memory, up to `WAITING_BYTES`, and are retried at most once in `RETRY_S` seconds.
Before each retry the file is truncated to its last whole line, so a reader never sees half a line in the middle. A file
that was removed is created again, beginning with its first line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

RETRY_S = 1.0
WAITING_BYTES = 1 << 20
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE})
"""Errors of a disk, which may pass; others are errors of the file's name."""

Opener = Callable[[], tuple[int, Path]]


class EventFile:
    """Appends lines of JSON.

    Args:
        opener: opens the file for writing, creating it where needed; returns its descriptor and path.
        name: of the file, for the warning.
        clock: seconds.

    Attributes:
        path: of the file; None until it could be opened.
        waiting_bytes: bytes that are not in the file yet.
        removed: whether the file was removed while it was written.

    Raises:
        OSError: the file cannot be opened for another reason than a full or broken disk.
    """

    def __init__(self, opener: Opener, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._opener, self._name, self._clock = opener, name, clock
        self.path: Path | None = None
        self._file: int | None = None
        self._end = 0  # of the last whole line
        self._first_line = b""  # is written again on top of a file that was removed
        self._recreated = self.removed = False  # after a removal, and empty so far
        self._waiting: deque[bytes] = deque()
        self.waiting_bytes = self._dropped = 0  # bytes that are not in the file yet; lines that were given up
        self._failed_at = float("-inf")
        self._warned = False
        try:
            self._open()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            self._fail(error)

    def add(self, line: str) -> None:
        """Queue a line, given without its newline, for the next `flush`."""
        data = line.encode() + b"\n"
        self._first_line = self._first_line or data
        self._waiting.append(data)
        self.waiting_bytes += len(data)
        while self.waiting_bytes > WAITING_BYTES and len(self._waiting) > 1:
            self.waiting_bytes -= len(self._waiting.popleft())
            self._dropped += 1

    def flush(self, now: bool = False) -> None:
        """Write the waiting lines; after a failure only when `RETRY_S` has passed, or with `now`."""
        if not now and self._clock() - self._failed_at < RETRY_S:
            return
        try:
            self._reopen()
            self._write()
        except OSError as error:
            self._fail(error)
            return
        if self._failed_at > float("-inf"):
            self._failed_at = float("-inf")
            logger.info("%s is written again", self._name)

    def close(self) -> None:
        """Write the waiting lines if possible, and close the file."""
        self.flush(now=True)
        if self.waiting_bytes:
            logger.warning("%d events are missing in %s", self._dropped + len(self._waiting), self._name)
        self._close()

    def _open(self) -> None:
        self._file, self.path = self._opener()
        self._end = os.fstat(self._file).st_size
        if self._end and os.pread(self._file, 1, self._end - 1) != b"\n":  # its last writer was killed within a line
            self._append(b"\n")

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _reopen(self) -> None:
        """Make sure that the file exists and ends with a whole line."""
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            self._close()
            self.removed = True
            logger.warning("%s was removed while it was written: it is created again, without what it held", self._name)
        if self._file is None:
            had_file = self.path is not None
            self._open()
            self._recreated = had_file and not self._end
        elif self._failed_at > float("-inf"):
            os.ftruncate(self._file, self._end)

    def _write(self) -> None:
        if self._recreated and self._waiting and self._waiting[0] is not self._first_line:
            self._append(self._first_line)
        self._recreated = False
        if self._dropped:
            self._append(json.dumps({"kind": "gap", "events": self._dropped}).encode() + b"\n")
            self._dropped = 0
        while self._waiting:
            data = b"".join(self._waiting) if self._failed_at == float("-inf") else self._waiting[0]
            self._append(data)
            taken = len(data)
            while taken:
                taken -= len(self._waiting[0])
                self.waiting_bytes -= len(self._waiting.popleft())

    def _append(self, data: bytes) -> None:
        """Append all of `data` or nothing."""
        assert self._file is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(data)

    def _fail(self, error: OSError) -> None:
        self._failed_at = self._clock()
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s cannot be written (%s): the run goes on, and the log goes on when there is room (logged once)",
                self._name,
                error.strerror or error,
            )
