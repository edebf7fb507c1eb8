# SPDX-License-Identifier: Apache-2.0
"""Files and folders: the operations whose order matters if power fails, and those that a failing disk may refuse.

:func:`paceline.core.runtime.disk` gives this process's disk, or that of its simulated machine. A file, and a folder's
names, are on the disk for sure only after `sync` and `sync_folder`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOTTY)
"""From file systems that have no `fsync`; any other error means that data are lost."""


def _sync(path: Path, flags: int) -> None:
    file = os.open(path, flags)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(file)


class LocalDisk:
    """This machine's; a simulated machine has another one with the same methods."""

    def write(self, path: Path, data: bytes) -> None:
        """Create or replace a file."""
        path.write_bytes(data)

    def write_private(self, path: Path, data: bytes) -> None:
        """Create or replace a file that only its owner can read."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(file, "wb") as out:
            out.write(data)

    def writing(self, path: Path) -> AbstractContextManager[Path]:
        """Create or replace a file in one context, through a path that any library can open."""
        return contextlib.nullcontext(path)

    def sync(self, path: Path) -> None:
        """Return once the file's contents are on the disk."""
        _sync(path, os.O_RDWR)

    def sync_folder(self, path: Path) -> None:
        """Return once the folder's names are on the disk."""
        with contextlib.suppress(PermissionError):  # a folder without the right to list it
            _sync(path, os.O_RDONLY)

    def replace(self, path: Path, target: Path) -> None:
        """Rename a file over another, or a folder to a name that is free, at once for all readers."""
        os.replace(path, target)

    def make_folder(self, path: Path) -> None:
        """Create a folder, unless it is there; the names of parents that this creates are synced, its own is not."""
        missing = [one for one in path.parents if not one.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for one in missing:
            self.sync_folder(one.parent)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove a folder with all that is in it."""
        shutil.rmtree(path)

    def read(self, path: Path) -> bytes:
        """The contents; FileNotFoundError if there is none."""
        return path.read_bytes()

    def open(self, path: Path) -> BinaryIO:
        """A file to read piece by piece."""
        return path.open("rb")

    def reading(self, path: Path) -> AbstractContextManager[Path]:
        """A path for one context, at which any library can read the file."""
        return contextlib.nullcontext(path)

    def size(self, path: Path) -> int:
        """Of a file, bytes."""
        return path.stat().st_size

    def names(self, path: Path) -> list[str]:
        """Of the files and folders in a folder, sorted."""
        return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        """Whether there is anything."""
        return path.exists()

    def is_file(self, path: Path) -> bool:
        """Whether there is a file, or a link to one."""
        return path.is_file()

    def is_folder(self, path: Path) -> bool:
        """Whether there is a folder, or a link to one."""
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        """Whether there is a symbolic link."""
        return path.is_symlink()

    def lock(self, path: Path) -> FileLock | None:
        """Lock a file, which is created; None if another process holds it. OSError where there are no locks."""
        key = os.getpid(), str(path)
        held = _HELD.get(key)
        if held is None or not held.holds():
            held = FileLock(key, path)
        return held if held.take() else None


class FileLock:
    """A POSIX lock on a file, once in a process: closing any handle of the file would release it.

    It ends with the process that holds it.
    """

    def __init__(self, key: tuple[int, str], path: Path) -> None:
        self._key, self._path, self._claims = key, path, 0
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)

    def take(self) -> bool:
        """Whether this process has it now."""
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not self._claims:
                os.close(self._handle)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        self._claims += 1
        _HELD[self._key] = self
        return True

    def holds(self) -> bool:
        """Whether the locked file is still the one of that name."""
        try:
            mine, there = os.fstat(self._handle), os.stat(self._path)
        except OSError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def write(self, data: bytes) -> None:
        """Replace the file's contents."""
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, data, 0)

    def release(self) -> None:
        """Release it, and empty the file, when all that took it in this process have done so."""
        if self._key[0] != os.getpid():  # a child has no lock of its parent's
            return
        self._claims -= 1
        if not self._claims:
            if _HELD.get(self._key) is self:
                del _HELD[self._key]
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)
            os.close(self._handle)


_HELD: dict[tuple[int, str], FileLock] = {}

LOCAL_DISK = LocalDisk()
