# SPDX-License-Identifier: Apache-2.0
"""What a process has fetched ahead and not yet used, written where the others of the host can see it.

Without this, processes that fetch ahead side by side would push each other's files out and fetch for ever. Each
process has a file of lines of 33 bytes (a key, or spaces), locked as long as it lives: one open file, however many the
wishes. Others read it when they look for something to remove. A reader may see a line just before it changes, which
costs a download at worst.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

from paceline.data.cache.locks import FileLock

LINE = 33
BLANK = b" " * 32 + b"\n"


class PrefetchHints:
    """This process's list, and the sight of those of others. The caller sees to it that one thread at a time writes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = FileLock(directory / f"{uuid.uuid4().hex}.wishes")
        self._lines: dict[str, int] = {}
        self._blank: list[int] = []

    def add(self, key: str) -> None:
        """This file has been fetched ahead."""
        if key in self._lines:
            return
        if not self._lines and not self._blank:
            while not self._lock.try_acquire(shared=False):
                time.sleep(0.001)  # somebody looks at this moment whether we are alive
        line = self._blank.pop() if self._blank else len(self._lines)
        self._lines[key] = line
        self._put(line, key.encode() + b"\n")

    def remove(self, key: str) -> None:
        """It has been used, or is not wished for any more."""
        line = self._lines.pop(key, None)
        if line is not None:
            self._blank.append(line)
            self._put(line, BLANK)

    def _put(self, line: int, text: bytes) -> None:
        with contextlib.suppress(OSError):  # on a full disk a wish is not seen by others, and nothing else is lost
            os.pwrite(self._lock.descriptor, text, line * LINE)

    def of_others(self) -> set[str]:
        """Keys that other processes have fetched ahead. Lists of dead processes are removed."""
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
        """Wish for nothing more."""
        self._lines, self._blank = {}, []
        self._lock.release(remove=True)
