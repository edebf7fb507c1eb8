# SPDX-License-Identifier: Apache-2.0
"""A disk of a simulated machine: full, slow, or without power in the middle of a write.

What a process wrote is there for all readers at once. If power fails, a file that was not synced has its earlier
contents, or any first part of the new ones; and of the renames since the folder was synced only the first few, or
none, have happened.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from paceline.testing.world.scheduler import Scheduler


class _File:
    def __init__(self) -> None:
        self.now = self.kept = b""


class SimDisk:
    """The files.

    Attributes:
        full: whether nothing more can be written.
        slow_s: seconds that an operation takes at most.
        armed: so many operations from now, what is called before the operation.
    """

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._names: dict[Path, _File] = {}
        self._kept: dict[Path, _File] = {}
        self._renames: list[dict[Path, _File]] = []  # the names after each change since they were synced
        self.full, self.slow_s = False, 0.0
        self.armed: tuple[int, Callable[[], None]] | None = None

    def write(self, path: Path, data: bytes) -> None:
        file = _File()
        if path in self._names:
            file = self._names[path]
        else:
            self._set({**self._names, path: file})
        half = self._world.rng.randrange(len(data) + 1)
        file.now = data[:half]
        self._take_time()
        if self.full:
            raise OSError(errno.ENOSPC, "no space is left on the device", str(path))
        file.now = data

    def sync(self, path: Path) -> None:
        self._take_time()
        file = self._names[path]
        file.kept = file.now

    def sync_folder(self, path: Path) -> None:
        self._take_time()
        self._kept, self._renames = self._names, []

    def replace(self, path: Path, target: Path) -> None:
        self._take_time()
        names = dict(self._names)
        names[target] = names.pop(path)
        self._set(names)

    def read(self, path: Path) -> bytes:
        self._take_time()
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return self._names[path].now

    def fail(self) -> None:
        """Power fails."""
        rng = self._world.rng
        survived = [self._kept, *self._renames][rng.randrange(len(self._renames) + 1)]
        self._names, self._kept, self._renames = dict(survived), dict(survived), []
        for file in dict.fromkeys(self._names.values()):
            if file.now != file.kept:
                file.now = file.now[: rng.randrange(len(file.now) + 1)] if rng.random() < 0.5 else file.kept
            file.kept = file.now

    def flip(self, path: Path) -> None:
        """Flip one bit of a file."""
        file = self._names.get(path)
        if file is not None and file.now:
            place = self._world.rng.randrange(8 * len(file.now))
            data = bytearray(file.now)
            data[place // 8] ^= 1 << place % 8
            file.now = file.kept = bytes(data)

    def _set(self, names: dict[Path, _File]) -> None:
        self._names = names
        self._renames.append(names)

    def _take_time(self) -> None:
        if self.armed is not None:
            left, call = self.armed
            self.armed = (left - 1, call) if left > 1 else None
            if left <= 1:
                call()
        if self.slow_s:
            self._world.sleep(self._world.rng.random() * self.slow_s)
        else:
            self._world.occasion()
