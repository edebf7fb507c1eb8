# SPDX-License-Identifier: Apache-2.0
"""What a worker prints goes to a file in the log directory; when its disk is full, the program still goes on.

`print` raises there, and a program that trains for days must not end with a progress bar that could not be written.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from typing import Any

from paceline.observe.event_file import FULL

KEPT_BYTES = 1 << 16


class Bearing(io.RawIOBase):
    """Passes bytes on to a file; those that find no room on its disk wait for the next ones, the last `KEPT_BYTES`.

    Args:
        file: its descriptor, which stays open.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._kept = b""

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """Of the file."""
        return self._file

    def write(self, data: Any) -> int:
        """What waits and all of `data`, or as much as there is room for; as if it were all."""
        rest = memoryview(self._kept + bytes(data))
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            if error.errno not in FULL:
                raise
        self._kept = bytes(rest[-KEPT_BYTES:])
        return memoryview(data).nbytes


def bear_a_full_disk() -> None:
    """Replace stdout and stderr where Python opened them, and they go to a file."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper or stream is not getattr(sys, f"__{name}__"):
            continue  # somebody else looks after it
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                setattr(sys, name, _bearing(stream))


def _bearing(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    raw = Bearing(stream.fileno())
    buffer: Any = raw if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(raw)  # python -u has no buffer
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
