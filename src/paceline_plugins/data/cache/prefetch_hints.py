# SPDX-License-Identifier: Apache-2.0
"""The files that each process has prefetched and not opened yet, written where the host's other processes see them.

Without these hints, processes that prefetch side by side would evict each other's files and fetch them again without
end. Each process has a file of lines of 33 bytes (a key, or spaces), locked while the process lives: one open file,
however long the list. Other processes read it before they evict. A reader may see a line just before it changes, which
costs a download at worst.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

from paceline_plugins.data.cache.locks import FileLock

LINE = 33
BLANK = b" " * 32 + b"\n"


class PrefetchHints:
    """The hints of this process, and a view of those of other processes. The caller lets one thread write at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = FileLock(directory / f"{uuid.uuid4().hex}.wishes")
        self._lines: dict[str, int] = {}
        self._blank: list[int] = []

    def add(self, key: str) -> None:
        """This file has been prefetched."""
        if key in self._lines:
            return
        if not self._lines and not self._blank:
            while not self._lock.try_acquire(shared=False):
                time.sleep(0.001)  # another process is testing whether this one is alive
        line = self._blank.pop() if self._blank else len(self._lines)
        self._lines[key] = line
        self._write(line, key.encode() + b"\n")

    def remove(self, key: str) -> None:
        """It has been opened, or is not needed any more."""
        line = self._lines.pop(key, None)
        if line is not None:
            self._blank.append(line)
            self._write(line, BLANK)

    def _write(self, line: int, text: bytes) -> None:
        with contextlib.suppress(OSError):  # on a full disk other processes miss the hint
            os.pwrite(self._lock.descriptor, text, line * LINE)

    def of_other_processes(self) -> set[str]:
        """Keys that other processes have prefetched. Removes the hints of dead processes."""
        found: set[str] = set()
        for path in self._directory.glob("*.wishes"):
            if path == self._lock.path:
                continue
            lock = FileLock(path)
            if lock.try_acquire(shared=False):
                lock.release(remove=True)
                continue
            with contextlib.suppress(OSError):
                found.update(path.read_text(encoding="ascii", errors="replace").split())
        return found

    def close(self) -> None:
        """Remove all hints."""
        self._lines, self._blank = {}, []
        self._lock.release(remove=True)
