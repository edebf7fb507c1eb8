# SPDX-License-Identifier: Apache-2.0
"""A file of whole lines that may fill its disk or be removed while it grows: whoever writes it goes on.

What cannot be written waits in memory, up to `WAITING_BYTES`, and is tried again at most once in `RETRY_S` seconds. A
reader never meets half a line in the middle of the file: before writing goes on, the file is cut back to the end of its
last whole line. A file that was removed is made anew, with its first line on top.
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
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE})
"""What is wrong with a disk, and not with the name of the file: it may pass."""

Opener = Callable[[], tuple[int, Path]]


class EventFile:
    """Appends lines of JSON.

    Args:
        opener: opens the file to write into it, and makes it where it is not there: its descriptor and its path.
        name: of the file, for the warning.
        clock: seconds.

    Attributes:
        path: of the file; None before it could be opened.

    Raises:
        OSError: the file cannot be opened, and for another reason than a full or broken disk.
    """

    def __init__(self, opener: Opener, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._opener, self._name, self._clock = opener, name, clock
        self.path: Path | None = None
        self._file: int | None = None
        self._end = 0  # of the last whole line
        self._first = b""  # the line on top, for a file that has to be made anew
        self._bare = False  # it was made anew, and has no line yet
        self._waiting: deque[bytes] = deque()
        self._size = self._lost = 0  # bytes that wait; lines that found no room
        self._failed_at = float("-inf")
        self._warned = False
        try:
            self._open()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._fail(error)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are not in the file yet."""
        return self._size

    def add(self, line: str) -> None:
        """Take a line, without its end, to be written at the next `flush`."""
        data = line.encode() + b"\n"
        self._first = self._first or data
        self._waiting.append(data)
        self._size += len(data)
        while self._size > WAITING_BYTES and len(self._waiting) > 1:
            self._size -= len(self._waiting.popleft())
            self._lost += 1

    def flush(self, now: bool = False) -> None:
        """Write what waits; after a failure only when `RETRY_S` has passed, unless it has to be `now`."""
        if not now and self._clock() - self._failed_at < RETRY_S:
            return
        try:
            self._ready()
            self._write()
        except OSError as error:
            self._fail(error)
            return
        if self._failed_at > float("-inf"):
            self._failed_at = float("-inf")
            logger.info("%s is written again", self._name)

    def close(self) -> None:
        """Write what waits, if that can be, and close the file."""
        self.flush(now=True)
        if self._size:
            logger.warning("%d events are missing in %s", self._lost + len(self._waiting), self._name)
        self._close()

    # -- the file -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._file, self.path = self._opener()
        self._end = os.fstat(self._file).st_size
        if self._end and os.pread(self._file, 1, self._end - 1) != b"\n":  # its last writer was killed within a line
            self._put(b"\n")

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _ready(self) -> None:
        """Have a file that is in its directory and ends with a whole line."""
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            self._close()
            logger.warning("%s was removed while it was written: it is made anew, without what it held", self._name)
        if self._file is None:
            again = self.path is not None
            self._open()
            self._bare = again and not self._end
        elif self._failed_at > float("-inf"):
            os.ftruncate(self._file, self._end)

    def _write(self) -> None:
        if self._bare and self._waiting and self._waiting[0] is not self._first:
            self._put(self._first)
        self._bare = False
        if self._lost:
            self._put(json.dumps({"kind": "gap", "events": self._lost}).encode() + b"\n")
            self._lost = 0
        while self._waiting:
            data = b"".join(self._waiting) if self._failed_at == float("-inf") else self._waiting[0]
            self._put(data)
            taken = len(data)
            while taken:
                taken -= len(self._waiting[0])
                self._size -= len(self._waiting.popleft())

    def _put(self, data: bytes) -> None:
        """Write all of it at the end of the file, or nothing."""
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
                "%s cannot be written (%s): the run goes on, and the log goes on when there is room (said once)",
                self._name,
                error.strerror or error,
            )
