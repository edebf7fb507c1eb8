# SPDX-License-Identifier: Apache-2.0
"""Names of files, resolved as the kernel does: it follows links, and `..` leads out of where they lead."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import posix
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUTSIDE = ("/dev/", "/sys/", "/run/")
"""No regular files lie there."""
CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR")
"""Variables that name the caches of libraries, which are safe for concurrent processes."""
STEPS = "PACELINE_CHECKPOINT"
"""The variable that names the place of checkpoint steps, to which every worker writes its part."""
HOMES = (".cache", ".config", ".triton", ".nv", ".keras", ".local")
"""The same, in the user's home."""
MOST_LINKS = 40
"""The kernel follows no more on one path."""
FD_PATH = getattr(fcntl, "F_GETPATH", None)
"""macOS' way of naming an open file."""


class Paths:
    """Resolves the paths of one worker.

    Args:
        logs: the run's log directory, which is not redirected.
    """

    def __init__(self, logs: Path) -> None:
        home = os.path.expanduser("~")
        named = [os.environ[name] for name in (*CACHES, STEPS) if os.environ.get(name)]
        inductor = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.environ.get('USER', 'root')}")
        shared = (*named, *(os.path.join(home, name) for name in HOMES), inductor, os.fspath(logs))
        both = (find(folder) for folder in shared for find in (os.path.abspath, os.path.realpath))
        self._passed = (*OUTSIDE, *(os.path.join(folder, "") for folder in both))
        self._private: set[str] = set()  # temporary files, whose names are unique

    @property
    def cwd(self) -> str:
        """The worker's directory."""
        return os.getcwd()

    def resolve(self, path: Any, follows: bool = True) -> str | None:
        """The file's absolute name without links; None for a path that every worker uses as it is.

        Args:
            path: the program's.
            follows: whether a link at its end is followed.
        """
        text = os.fsdecode(path) if is_path(path) else ""
        whole = text if text.startswith("/") else os.path.join(self.cwd, text)
        if not text or self._is_passed(os.path.normpath(whole)):
            return None
        name = self._walk(whole, follows)
        return None if name.startswith("/proc/") or name == "/" or self._is_passed(name) else name

    def _is_passed(self, name: str) -> object:
        private = self._private and not self._private.isdisjoint(upwards(name))
        return private or f"{name}/".startswith(self._passed)

    def _walk(self, whole: str, follows: bool) -> str:
        parts, here, links = whole.split("/")[::-1], "", 0
        while parts:
            part = parts.pop()
            if part == "..":
                here = self.above(here)
            elif part not in ("", "."):
                target = self.link(f"{here}/{part}", bool(parts)) if parts or follows else None
                if target is None:
                    here = f"{here}/{part}"
                    continue
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), whole)
                here = "" if target.startswith("/") else here
                parts += target.split("/")[::-1]
        return here or "/"

    def above(self, folder: str) -> str:
        """The directory above."""
        return folder.rpartition("/")[0]

    def link(self, name: str, inside: bool = False) -> str | None:
        """Where the link of that name leads; None if there is none. `inside`: it is followed by more of a path."""
        try:
            target = posix.readlink(name)
        except OSError:
            return None
        if not name.startswith("/proc/"):
            return target
        return self.of_real(target) if is_there(os.path.join("/proc", target)) else None  # a pipe, a deleted file

    def of_real(self, real: str) -> str:
        """The name of a real path."""
        return real

    def opened(self, number: int) -> str:
        """The name of an open directory."""
        if FD_PATH is not None:
            return self.of_real(os.fsdecode(fcntl.fcntl(number, FD_PATH, bytes(1024)).rstrip(b"\0")))
        real = posix.readlink(f"/proc/self/fd/{number}")
        return self.of_real(real if is_there(real) else real.removesuffix(" (deleted)"))

    def whole(self, path: Any, folder: int | None) -> Any:
        """The path, from the root if it begins in the open directory `folder`."""
        return path if folder is None else like(path, os.path.join(self.opened(folder), os.fsdecode(path)))

    def keep_as_is(self, name: str) -> None:
        """Do not redirect a temporary file or directory: native code may get its name."""
        self._private.add(name)


def is_path(value: Any) -> bool:
    """Whether it names a file; not a number of an open one."""
    return isinstance(value, (str, bytes, os.PathLike))


def like(path: Any, found: str) -> Any:
    """`found` as bytes where the program's path is bytes."""
    return os.fsencode(found) if isinstance(path, bytes) else found


def status(path: str) -> os.stat_result | None:
    """Of the real file or link of that name; None if there is none."""
    try:
        return posix.lstat(path)
    except OSError:
        return None


def is_there(path: str) -> bool:
    """Whether the real file system has a file, a directory or a link of that name."""
    return status(path) is not None


def is_folder(path: str) -> bool:
    """Whether it is a directory of the real file system, and no link to one."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def make_folders(path: str) -> None:
    """Make a real directory, and those above it."""
    with contextlib.suppress(FileExistsError):
        try:
            posix.mkdir(path)
        except FileNotFoundError:
            make_folders(os.path.dirname(path))
            posix.mkdir(path)


def copy(source: str, target: str) -> None:
    """Copy a real file or link, which appears at `target` when it is complete."""
    make_folders(os.path.dirname(target))
    shutil.copy2(source, f"{target}.part", follow_symlinks=False)
    posix.rename(f"{target}.part", target)


def upwards(name: str) -> Iterator[str]:
    """The path, and its parent directories."""
    while len(name) > 1:
        yield name
        name = name.rpartition("/")[0]
