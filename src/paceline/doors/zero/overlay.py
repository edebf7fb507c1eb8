# SPDX-License-Identifier: Apache-2.0
"""A worker's view of the file system: the files that existed when it began, overlaid with its own writes.

Its writes go to a folder of its own, under the absolute path that the program gave; its removals are recorded. Files
and directories created since the worker began belong to another worker, may be incomplete, and are hidden. The
creation time decides, not the modification time: a directory to which rank 0 adds stays visible.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import posix
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUTSIDE = ("/dev/", "/proc/", "/sys/", "/run/")
"""No regular files lie there."""
CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR")
"""Variables that name the caches of libraries, which are safe for concurrent processes."""
STEPS = "PACELINE_CHECKPOINT"
"""The variable that names the place of checkpoint steps, to which every worker writes its part."""
HOMES = (".cache", ".config", ".triton", ".nv", ".keras", ".local")
"""The same, in the user's home."""
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


def _shared_folders() -> tuple[str, ...]:
    named = [os.environ[name] for name in (*CACHES, STEPS) if os.environ.get(name)]
    home = os.path.expanduser("~")
    inductor = [os.path.join(tempfile.gettempdir(), f"torchinductor_{os.environ.get('USER', 'root')}")]
    folders = [*named, *(os.path.join(home, name) for name in HOMES), *inductor]
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)


class Overlay:
    """Maps paths to this worker's files.

    Args:
        folder: for its writes.
        logs: the run's log directory, which is not overlaid.
        began: files created later are hidden; seconds since the epoch.
        chdir: changes the directory of the process; None if virtual workers share the process.
    """

    def __init__(self, folder: Path, logs: Path, began: float, chdir: Any = os.chdir) -> None:
        self._folder, self.began = os.path.abspath(folder), began
        self._passed = (*OUTSIDE, os.path.join(os.path.abspath(logs), ""), *_shared_folders())
        self._removed: set[str] = set()
        self._private: set[str] = set()  # temporary files, whose names are unique
        self._children_since = float("inf")
        self.cwd, self._chdir, self._at_home = os.getcwd(), chdir, chdir is not None

    # -- names ------------------------------------------------------------------------------------

    def name(self, path: Any) -> str | None:
        """The absolute path; None for a path that is not overlaid."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        text = os.fsdecode(path)
        if not text:
            return None
        name = os.path.normpath(os.path.join(self.cwd, text))
        if f"{name}/".startswith(self._passed) or name == "/":
            return None
        if self._private and any(part in self._private for part in _upwards(name)):
            return None
        return name

    def own(self, name: str) -> str:
        """Where this worker writes that path."""
        return self._folder + name

    def plain(self, path: Any) -> Any:
        """The path to give the system when it is not overlaid."""
        if self._at_home or not isinstance(path, (str, bytes, os.PathLike)):
            return path
        whole = os.path.join(self.cwd, os.fsdecode(path))
        return os.fsencode(whole) if isinstance(path, bytes) else whole

    def keep_as_is(self, path: Any) -> None:
        """Do not overlay a temporary file or directory: native code may get its name."""
        self._private.add(os.path.normpath(os.path.join(self.cwd, os.fsdecode(path))))

    def starts_child(self) -> None:
        """The worker starts a process, which bypasses the overlay: files created from now on may be its own."""
        self._children_since = min(self._children_since, time.time() - COARSE_S)

    # -- what is there ----------------------------------------------------------------------------

    def sees(self, name: str) -> bool:
        """Whether it existed when this worker began, and this worker has not removed it."""
        if self._removed and self.was_removed(name):
            return False
        try:
            found = posix.lstat(name)
        except OSError:
            return False
        if found.st_ctime < self.began:
            return True
        birth = born(name)
        if birth is None:
            birth = 0.0 if stat.S_ISDIR(found.st_mode) else found.st_mtime
        return birth < self.began or birth >= self._children_since

    def is_own(self, name: str) -> bool:
        """Whether this worker wrote it."""
        return _is_real(self.own(name))

    def exists(self, name: str) -> bool:
        """Whether it exists for this worker."""
        return self.is_own(name) or self.sees(name)

    def is_folder(self, name: str) -> bool:
        """Whether it is a directory for this worker."""
        if self.is_own(name):
            return is_real_folder(self.own(name))
        return self.sees(name) and is_real_folder(name)

    def names(self, name: str) -> list[str] | None:
        """A directory's entries for this worker, sorted; None if the overlay does not change them."""
        own = self.own(name)
        lies = self.sees(name) and is_real_folder(name)
        mine = set(posix.listdir(own)) if is_real_folder(own) else set()
        if not lies:
            return sorted(mine) if is_real_folder(own) else None
        if not mine and not self._removed and posix.stat(name).st_mtime < self.began:
            return None
        with contextlib.suppress(OSError):
            mine |= {entry for entry in posix.listdir(name) if self.sees(os.path.join(name, entry))}
        return sorted(mine)

    # -- reading and writing ----------------------------------------------------------------------

    def to_read(self, path: Any) -> Any:
        """The path to read instead.

        Raises:
            FileNotFoundError: it does not exist for this worker.
        """
        name = self.name(path)
        if name is None:
            return self.plain(path)
        if self.is_own(name):
            return _like(path, self.own(name))
        if not self.sees(name):
            raise missing(path)
        return self.plain(path)

    def to_open(self, path: Any) -> Any:
        """The path to open instead; another worker's new file is read once no process has it open for writing."""
        name = self.name(path)
        if name is not None and not self.exists(name) and not self.was_removed(name) and _is_finished(name):
            return self.plain(path)
        return self.to_read(path)

    def to_write(self, path: Any, keeps: bool = False) -> Any:
        """The path to write instead.

        Args:
            path: the program's.
            keeps: whether to keep the file's content.
        """
        name = self.name(path)
        if name is None:
            return self.plain(path)
        own, folder = self.own(name), os.path.dirname(name)
        if not self.is_folder(folder):
            raise missing(path)
        if not _is_real(own) and self.sees(name):
            if is_real_folder(name):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            _make_folders(os.path.dirname(own))
            if keeps and posix.stat(name).st_mtime < self.began:
                shutil.copyfile(name, own)
        _make_folders(os.path.dirname(own))
        return _like(path, own)

    def to_make(self, path: Any) -> Any:
        """The path to create instead; it must not exist for this worker."""
        name = self.name(path)
        if name is not None and self.exists(name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return self.to_write(path)

    def remove(self, name: str) -> None:
        """Record it as removed."""
        self._removed.add(name)

    def was_removed(self, name: str) -> bool:
        """Whether this worker has removed it or a directory above it."""
        return any(part in self._removed for part in _upwards(name))

    # -- where the worker is ----------------------------------------------------------------------

    def go(self, path: Any) -> None:
        """`os.chdir`."""
        name = self.name(path)
        whole = os.path.normpath(os.path.join(self.cwd, os.fsdecode(path))) if name is None else name
        if name is not None and not self.exists(name):
            raise missing(path)
        there = self.own(whole) if name is not None and not self.sees(name) else whole
        if not is_real_folder(there):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if self._chdir is not None:
            self._chdir(there)
        self.cwd, self._at_home = whole, self._chdir is not None and there == whole


def is_real_folder(path: str) -> bool:
    """Whether it is a directory of the real file system, not of the overlay."""
    try:
        return stat.S_ISDIR(posix.stat(path).st_mode)
    except OSError:
        return False


def _is_real(path: str) -> bool:
    try:
        posix.lstat(path)
    except OSError:
        return False
    return True


def _make_folders(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        try:
            posix.mkdir(path)
        except FileNotFoundError:
            _make_folders(os.path.dirname(path))
            posix.mkdir(path)


def missing(path: Any) -> FileNotFoundError:
    """The error that the system raises."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _like(path: Any, found: str) -> Any:
    return os.fsencode(found) if isinstance(path, bytes) else found


def _upwards(name: str) -> Iterator[str]:
    """The path, and its parent directories."""
    while len(name) > 1:
        yield name
        name = os.path.dirname(name)


def _is_finished(name: str) -> bool:
    """Whether a file exists and no process of this host has it open for writing."""
    try:
        wanted = posix.stat(name)
    except OSError:
        return False
    if not stat.S_ISREG(wanted.st_mode):
        return False
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    held = os.stat(f"/proc/{process}/fd/{number}")
                    if (held.st_dev, held.st_ino) == (wanted.st_dev, wanted.st_ino):
                        said = Path(f"/proc/{process}/fdinfo/{number}").read_text(encoding="ascii")
                        if int(said.split("flags:")[1].split()[0], 8) & os.O_ACCMODE:
                            return False
    return True
