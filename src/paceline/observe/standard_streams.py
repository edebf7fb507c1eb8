# SPDX-License-Identifier: Apache-2.0
"""A worker's stdout and stderr in a log directory: when the disk is full, the program still goes on.

`print` raises there, and a training of days must not end because a progress bar could not be written.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from typing import Any

from paceline.observe.event_file import DISK_ERRORS

KEPT_BYTES = 1 << 16


class DiskFullTolerantFile(io.RawIOBase):
    """Writes bytes to a file; keeps the last `KEPT_BYTES` that its disk has no room for, until the next write.

    Args:
        file: its descriptor, which stays open.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._kept = b""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file

    def write(self, data: Any) -> int:
        """Write the kept bytes and `data` as far as there is room; report all of `data` as written."""
        rest = memoryview(self._kept + bytes(data))
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
        self._kept = bytes(rest[-KEPT_BYTES:])
        return memoryview(data).nbytes


def tolerate_full_disk() -> None:
    """Wrap stdout and stderr where Python opened them and they go to a file."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper or stream is not getattr(sys, f"__{name}__"):
            continue  # another library has replaced it
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                setattr(sys, name, _tolerant(stream))


def _tolerant(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    raw = DiskFullTolerantFile(stream.fileno())
    buffer: Any = raw if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(raw)  # python -u has no buffer
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
