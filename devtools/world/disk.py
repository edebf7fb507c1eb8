# SPDX-License-Identifier: Apache-2.0
"""A disk of a simulated machine: full, slow, failing, or without power in the middle of a write.

What a process wrote is there for all readers at once. If power fails, a file that was not synced has its earlier
contents, or any first part of the new ones; and in each folder, of the changes of names since it was synced only the
first few, or none, have happened. Folders know nothing of each other: what was removed within one may be gone although
its own earlier name is back.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from devtools.world.scheduler import Scheduler

_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # for files that other libraries open


class _File:
    def __init__(self) -> None:
        self.now = self.kept = b""
        self.lost = False  # a sync has failed: what it was to keep is marked as kept, and is not
        self.lock: tuple[object, int] | None = None  # which process, and how often


class _Folder:
    def __init__(self) -> None:
        self.now: dict[str, _Node] = {}
        self.kept: dict[str, _Node] = {}
        self.changes: list[dict[str, _Node]] = []  # the names after each change since they were synced


_Node = _File | _Folder


class SimDisk:
    """The files.

    Attributes:
        room: bytes that can still be written; None: as many as one likes.
        slow_s: seconds that an operation takes at most.
        failing: so many operations that read or sync fail, with EIO; what a failed sync was to keep is lost if power
            fails, even if a later one succeeds.
        failing_after: so many of them are well before.
        failures: operations that failed so.
        armed: so many operations from now, what is called before the operation.
    """

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._root = _Folder()
        self.room: int | None = None
        self.slow_s = 0.0
        self.failing: dict[str, int] = {"read": 0, "sync": 0}
        self.failing_after: dict[str, int] = {"read": 0, "sync": 0}
        self.failures = 0
        self.armed: tuple[int, Callable[[], None]] | None = None

    @property
    def full(self) -> bool:
        """Whether nothing more can be written."""
        return self.room == 0

    @full.setter
    def full(self, full: bool) -> None:
        self.room = 0 if full else None

    # -- names ------------------------------------------------------------------------------------

    def _find(self, path: Path) -> _Node | None:
        node: _Node | None = self._root
        for part in path.parts[1:]:
            node = node.now.get(part) if isinstance(node, _Folder) else None
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(path))
        if not isinstance(node, _Folder):
            raise NotADirectoryError(errno.ENOTDIR, "this is no folder", str(path))
        return node

    def _file(self, path: Path) -> _File:
        node = self._find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        if not isinstance(node, _File):
            raise IsADirectoryError(errno.EISDIR, "this is a folder", str(path))
        return node

    def _set(self, folder: _Folder, names: dict[str, _Node]) -> None:
        folder.now = names
        folder.changes.append(names)

    def exists(self, path: Path) -> bool:
        return self._find(path) is not None

    def is_file(self, path: Path) -> bool:
        return isinstance(self._find(path), _File)

    def is_folder(self, path: Path) -> bool:
        return isinstance(self._find(path), _Folder)

    def is_link(self, path: Path) -> bool:
        return False

    def names(self, path: Path) -> list[str]:
        self._take_time()
        return sorted(self._folder(path).now)

    def size(self, path: Path) -> int:
        return len(self._file(path).now)

    # -- changes ----------------------------------------------------------------------------------

    def write(self, path: Path, data: bytes) -> None:
        folder, file = self._folder(path.parent), _File()
        if path.name in folder.now:
            file = self._file(path)
        else:
            self._set(folder, {**folder.now, path.name: file})
        file.lost = False
        half = int(self._world.rng.random() * (len(data) + 1))
        file.now = data[:half]
        self._take_time()
        if self.room is not None:
            written = min(len(data), self.room)
            self.room -= written
            file.now = data[:written]
            if written < len(data):
                raise OSError(errno.ENOSPC, "no space is left on the device", str(path))
        file.now = data

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[Path]:
        self._folder(path.parent)
        handle, name = tempfile.mkstemp(prefix="paceline-world-", dir=_MEMORY)
        os.close(handle)
        try:
            yield Path(name)
            self.write(path, Path(name).read_bytes())
        finally:
            os.unlink(name)

    def sync(self, path: Path) -> None:
        file = self._file(path)
        try:
            self._take_time("sync")
        except OSError:
            file.lost = True
            raise
        if not file.lost:
            file.kept = file.now

    def sync_folder(self, path: Path) -> None:
        self._take_time("sync")
        folder = self._folder(path)
        folder.kept, folder.changes = folder.now, []

    def replace(self, path: Path, target: Path) -> None:
        self._take_time()
        assert path.parent == target.parent, "renames stay within a folder"
        folder = self._folder(path.parent)
        names = dict(folder.now)
        if path.name not in names:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        there = names.get(target.name)
        if isinstance(there, _Folder) and there.now:
            raise OSError(errno.ENOTEMPTY, "the folder is not empty", str(target))
        names[target.name] = names.pop(path.name)
        self._set(folder, names)

    def make_folder(self, path: Path) -> None:
        self._take_time()
        for one in [*reversed(path.parents), path]:
            if not self.exists(one):
                parent = self._folder(one.parent)
                self._set(parent, {**parent.now, one.name: _Folder()})
                if one != path:
                    self.sync_folder(one.parent)
        self._folder(path)

    def remove(self, path: Path) -> None:
        self._take_time()
        self._file(path)
        folder = self._folder(path.parent)
        self._set(folder, {name: node for name, node in folder.now.items() if name != path.name})

    def remove_folder(self, path: Path) -> None:
        for name in self.names(path):
            (self.remove_folder if self.is_folder(path / name) else self.remove)(path / name)
        self._take_time()
        folder = self._folder(path.parent)
        self._set(folder, {name: node for name, node in folder.now.items() if name != path.name})

    # -- reading ----------------------------------------------------------------------------------

    def read(self, path: Path) -> bytes:
        self._take_time("read")
        return self._file(path).now

    def open(self, path: Path) -> BinaryIO:
        return io.BytesIO(self.read(path))

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[Path]:
        data = self.read(path)
        with tempfile.NamedTemporaryFile(prefix="paceline-world-", dir=_MEMORY) as file:
            file.write(data)
            file.flush()
            yield Path(file.name)

    # -- locks ------------------------------------------------------------------------------------

    def lock_for(self, process: object, path: Path) -> SimFileLock | None:
        """Lock a file for a process; None if another one has it."""
        self._take_time()
        folder = self._folder(path.parent)
        if path.name not in folder.now:  # at once: an open that creates empties no file that another one created
            self._set(folder, {**folder.now, path.name: _File()})
        file = self._file(path)
        if file.lock is not None and file.lock[0] is not process:
            return None
        file.lock = process, 1 if file.lock is None else file.lock[1] + 1
        return SimFileLock(self, process, path, file)

    # -- faults -----------------------------------------------------------------------------------

    def fail(self) -> None:
        """Power fails."""
        self._forget(self._root)

    def _forget(self, folder: _Folder) -> None:
        rng = self._world.rng
        survived = [folder.kept, *folder.changes][rng.randrange(len(folder.changes) + 1)]
        folder.now, folder.kept, folder.changes = dict(survived), dict(survived), []
        for node in dict.fromkeys(folder.now.values()):
            if isinstance(node, _Folder):
                self._forget(node)
                continue
            node.lock = None
            if node.now != node.kept:
                node.now = node.now[: int(rng.random() * (len(node.now) + 1))] if rng.random() < 0.5 else node.kept
            node.kept = node.now

    def flip(self, path: Path) -> bool:
        """Flip one bit of a file; whether there was one."""
        file = self._find(path)
        if not isinstance(file, _File) or not file.now:
            return False
        place = int(self._world.rng.random() * 8 * len(file.now))
        data = bytearray(file.now)
        data[place // 8] ^= 1 << place % 8
        file.now = file.kept = bytes(data)
        return True

    def forget(self, path: Path) -> None:
        """Lose a file or a folder with all that is in it."""
        folder = self._find(path.parent)
        if isinstance(folder, _Folder):
            for names in (folder.now, folder.kept, *folder.changes):
                names.pop(path.name, None)

    def files(self, path: Path = Path("/")) -> list[Path]:
        """All files at and below a folder."""
        node = self._find(path)
        if isinstance(node, _Folder):
            return [file for name in sorted(node.now) for file in self.files(path / name)]
        return [] if node is None else [path]

    def content(self, path: Path) -> bytes | None:
        """What a file holds, for those who check it: takes no time, and never fails; None if there is none."""
        file = self._find(path)
        return file.now if isinstance(file, _File) else None

    def _take_time(self, kind: str = "") -> None:
        if self.armed is not None:
            left, call = self.armed
            self.armed = (left - 1, call) if left > 1 else None
            if left <= 1:
                call()
        if self.slow_s:
            self._world.sleep(self._world.rng.random() * self.slow_s)
        else:
            self._world.occasion()
        if self.failing.get(kind) and self.failing_after[kind]:
            self.failing_after[kind] -= 1
        elif self.failing.get(kind):
            self.failing[kind] -= 1
            self.failures += 1
            raise OSError(errno.EIO, "input/output error")


class SimFileLock:
    """What :class:`paceline.core.disk.FileLock` is."""

    def __init__(self, disk: SimDisk, process: object, path: Path, file: _File) -> None:
        self._disk, self._process, self._path, self._file = disk, process, path, file

    def holds(self) -> bool:
        return self._disk._find(self._path) is self._file

    def write(self, data: bytes) -> None:
        self._disk.write(self._path, data)

    def release(self) -> None:
        if self._file.lock is not None and self._file.lock[0] is self._process:
            left = self._file.lock[1] - 1
            self._file.lock = (self._process, left) if left else None
            if not left:
                self._file.now = b""

    def end(self) -> None:
        """The process has ended."""
        if self._file.lock is not None and self._file.lock[0] is self._process:
            self._file.lock = None
