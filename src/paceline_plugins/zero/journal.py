# SPDX-License-Identifier: Apache-2.0
"""What rank 0 changes in the file system, so that the other workers see what was there when the job began.

Rank 0 writes the program's own files. Before it changes one that was there, it keeps it in the log directory: a hard
link where it removes or replaces the file, a copy where it writes into it. It marks each name that it makes; a mark
covers all names below. A worker that cannot read this journal, on a host with another log directory, goes by the time
at which a file was created, if the file system records it: not by its modification time, since a directory to which
rank 0 adds is still the old one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import posix
import shutil
import stat
import struct
import time
from pathlib import Path

from paceline_plugins.zero.paths import copy, is_folder, is_there, make_folders, status

FOLDER = "files"
"""Folder in the log directory for the files of all ranks but 0, and for what rank 0 has changed."""
MOST_BYTES = 1 << 30
"""Larger files are not copied before rank 0 writes into them."""
KINDS = (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR)
"""What is kept: regular files, links, directories."""
COARSE_S = 0.01
"""How late the clock of a file system may be."""
_AT_FDCWD, _SYMLINK_ITSELF, _BIRTH = -100, 0x100, 0x800  # of Linux' statx


def process_began() -> float:
    """When this process began, seconds since the epoch; the present time if the system does not report it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
    return time.time() - max(0.0, age_s)


def born(path: str) -> float | None:
    """When a file was created, seconds since the epoch; None if the file system does not report it."""
    buffer = ctypes.create_string_buffer(256)
    try:
        failed = ctypes.CDLL(None).statx(_AT_FDCWD, os.fsencode(path), _SYMLINK_ITSELF, _BIRTH, buffer)
    except AttributeError:  # no Linux
        return None
    if failed or not struct.unpack_from("<I", buffer.raw)[0] & _BIRTH:
        return None
    seconds, nanoseconds = struct.unpack_from("<qI", buffer.raw, 0x50)
    return float(seconds + nanoseconds / 1e9)


class Journal:
    """Rank 0's changes since the job began.

    Args:
        logs: the log directory of rank 0.
        began: when the job began, seconds since the epoch: the same on all workers.
    """

    def __init__(self, logs: Path, began: float) -> None:
        self.began = began
        self._place = os.path.join(os.path.realpath(logs), FOLDER, f"start-{began:.6f}")
        self.kept, self._made = f"{self._place}/kept", f"{self._place}/made"
        self._children_since = float("inf")
        self._is_shared = False
        self._linked: set[tuple[int, int]] = set()  # device and inode of kept files that have another name

    # -- for the other workers --------------------------------------------------------------------

    def at_start(self, name: str) -> str | None:
        """The real path of what was at `name` when the job began; None if nothing was."""
        kept, found = status(self.kept + name), status(name)
        if kept is not None and not stat.S_ISDIR(kept.st_mode):
            return self.kept + name
        if found is not None and not self._is_new(name, found):
            return name
        return self.kept + name if kept is not None else None

    def is_unchanged(self, folder: str) -> bool:
        """Whether rank 0 has neither added to a directory nor removed from it."""
        if is_there(self.kept + folder) or is_there(self._made + folder):
            return False
        return self._can_read() or posix.stat(folder).st_mtime < self.began

    def _can_read(self) -> bool:
        """Whether rank 0 keeps its journal where this worker sees it."""
        self._is_shared = self._is_shared or is_folder(self._place)
        return self._is_shared

    def _is_new(self, name: str, found: os.stat_result) -> bool:
        if self._is_marked(name):
            return True
        if self._can_read() or found.st_ctime < self.began:
            return False  # what rank 0 has not made is old, or comes from a child process or native code
        birth = born(name)
        if birth is None:
            birth = 0.0 if stat.S_ISDIR(found.st_mode) else found.st_mtime
        return self.began <= birth < self._children_since

    def starts_child(self) -> None:
        """This worker starts a process, and files that are made from now on may be its own."""
        self._children_since = min(self._children_since, time.time() - COARSE_S)

    # -- for rank 0 -------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin, and remove those of earlier starts."""
        make_folders(self._place)
        folder, own = os.path.split(self._place)
        for name in posix.listdir(folder):
            if name.startswith("start-") and name != own:
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)

    def makes(self, name: str) -> None:
        """Rank 0 makes a file or a directory of that name, unless one is there."""
        if not is_there(name):
            self.marks(name)

    def removes(self, name: str) -> None:
        """Rank 0 removes or replaces it, with all below."""
        found = self._old(name)
        if found is not None and stat.S_ISDIR(found.st_mode):
            make_folders(self.kept + name)
            for entry in posix.listdir(name):
                self.removes(f"{name}/{entry}")
        elif found is not None and not self._keep(name):
            self.writes(name, keeps=True)

    def writes(self, name: str, keeps: bool) -> None:
        """Rank 0 writes into a file; `keeps`: not from its beginning."""
        found, present = self._old(name), status(name)
        if present is not None and (present.st_dev, present.st_ino) in self._linked:
            copy(name, name)  # it has been moved to this name
        elif found is None:
            self.makes(name)
        elif not stat.S_ISDIR(found.st_mode):
            alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
            if not keeps and alone and posix.access(name, os.W_OK) and self._keep(name):
                new = f"{self.kept}{name}.new"  # others may read the old one
                posix.close(posix.open(new, os.O_CREAT | os.O_WRONLY))
                posix.chmod(new, stat.S_IMODE(found.st_mode))
                posix.rename(new, name)
            elif found.st_size <= MOST_BYTES:
                copy(name, self.kept + name)

    def _keep(self, name: str) -> bool:
        """Keep a file as it is by another link to it; returns whether that was possible."""
        make_folders(os.path.dirname(self.kept + name))
        try:
            posix.link(name, self.kept + name, follow_symlinks=False)
        except OSError:  # on another disk
            return False
        found = posix.lstat(name)
        self._linked.add((found.st_dev, found.st_ino))
        return True

    def _old(self, name: str) -> os.stat_result | None:
        """The status of what has been at `name` since the job began, unless it is kept already."""
        found, kept = status(name), status(self.kept + name)
        if found is None or stat.S_IFMT(found.st_mode) not in KINDS or self._is_marked(name):
            return None
        return found if kept is None or stat.S_ISDIR(kept.st_mode) else None

    def marks(self, name: str) -> None:
        """Whatever is at that name, rank 0 has made it."""
        if self._is_marked(name):
            return
        with contextlib.suppress(FileExistsError, NotADirectoryError):  # a name below or above it is marked
            make_folders(os.path.dirname(self._made + name))
            posix.close(posix.open(self._made + name, os.O_CREAT | os.O_WRONLY))

    def _is_marked(self, name: str) -> bool:
        try:
            return not stat.S_ISDIR(posix.lstat(self._made + name).st_mode)
        except NotADirectoryError:  # a directory above it is marked
            return True
        except OSError:
            return False
