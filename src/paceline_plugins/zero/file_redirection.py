# SPDX-License-Identifier: Apache-2.0
"""Only rank 0 writes the program's files; every other worker has an overlay of its own (:mod:`.overlay`).

Patched are Python's `open` and the functions of `os` that take a path, on which most libraries build (`pathlib`,
`shutil`, `glob`, `tempfile`, `logging`, NumPy, PIL, matplotlib, csv, TensorBoard's writer), and the native writers and
readers of :mod:`.native_files`. Other native libraries and child processes bypass the overlay. All workers list
directories in sorted order, since the file system's order may differ between hosts.
"""

from __future__ import annotations

import builtins
import bz2
import contextlib
import errno
import functools
import io
import os
import pathlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy

from paceline_plugins.zero import native_files
from paceline_plugins.zero.callers import calling_module
from paceline_plugins.zero.journal import FOLDER, Journal
from paceline_plugins.zero.overlay import Overlay, RealFiles
from paceline_plugins.zero.patches import Patches
from paceline_plugins.zero.paths import is_folder, is_path

Function = Callable[..., Any]


class Entries:
    """An `os.scandir` iterator over sorted entries."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to close."""


class OverlayEntry:
    """An `os.DirEntry` of a directory that is seen through an overlay.

    Args:
        folder: as the program named it.
        place: its absolute name.
        name: in it.
    """

    def __init__(self, folder: Any, place: str, name: str) -> None:
        self._place = os.path.join(place, name)
        self.name: Any = os.fsencode(name) if isinstance(folder, bytes) else name
        self.path: Any = self.name if isinstance(folder, int) else os.path.join(os.fspath(folder), self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As `os.DirEntry.stat`."""
        return os.stat(self._place, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """As `os.DirEntry.inode`."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """As `os.DirEntry.is_dir`."""
        return os.path.isdir(self._place) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """As `os.DirEntry.is_file`."""
        return os.path.isfile(self._place) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        """As `os.DirEntry.is_symlink`."""
        return os.path.islink(self._place)


def in_order(patches: Patches) -> None:
    """List directories in sorted order, on rank 0."""

    def listing(original: Function) -> Function:
        return lambda path=".": sorted(original(path))

    def scanning(original: Function) -> Function:
        return lambda path=".": Entries(sorted(original(path), key=lambda entry: entry.name))

    patches.replace(os, "listdir", listing)
    patches.replace(os, "scandir", scanning)


READS = ("stat", "lstat", "readlink", "statvfs", "getxattr", "listxattr")
"""Functions of `os` that read the metadata of their first argument."""
TOUCHES = ("chmod", "chown", "lchown", "utime", "setxattr", "removexattr")
"""Functions that change a file's metadata, not its content."""
OF_LINKS = ("lstat", "readlink", "lchown")
"""Functions that do not follow a link at the end of a path."""


def redirect_files(logs: Path, rank: int, journal: Journal, patches: Patches, alone: bool = True) -> None:
    """Patch the functions that open, make, move, remove, read and list files.

    Args:
        logs: the run's log directory.
        rank: of this worker.
        journal: of what rank 0 changes.
        patches: takes the patches.
        alone: whether the process runs this worker only.
    """
    if rank == 0:
        journal.open()
        in_order(patches)
        FileRedirection(RealFiles(logs, journal)).install(patches)
        return
    own = Path(os.path.abspath(logs)) / FOLDER / f"rank-{rank:03d}"
    shutil.rmtree(own, ignore_errors=True)  # a restart resumes from rank 0's files
    view = Overlay(own, logs, journal, os.chdir if alone else None)
    OverlayRedirection(view, journal.starts_child).install(patches)


class FileRedirection:
    """Replacements for the functions that take paths.

    Args:
        view: rank 0's.
    """

    def __init__(self, view: RealFiles) -> None:
        self._view = view

    def _open(self, original: Function) -> Function:
        def opens(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if not isinstance(mode, str) or kwargs.get("opener") or (args[5:] and args[5]):
                return original(file, mode, *args, **kwargs)  # an opener gets the path as given
            return original(self._view.opening(file, mode), mode, *args, **kwargs)

        return opens

    def _open_number(self, original: Function) -> Function:
        def opens(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
            path = self._view.whole(path, dir_fd)
            if flags & getattr(os, "O_TMPFILE", 0) != getattr(os, "O_TMPFILE", -1):  # else it gets no name
                path = self._as_it_is(path) if self._is_temporary(path) else self._view.opening(path, _mode(flags))
            return original(path, flags, mode)

        return opens

    def _is_temporary(self, path: Any) -> bool:
        """Whether `tempfile` asks, for a file with a unique name in the system's folder."""
        if calling_module(1) != "tempfile":
            return False
        folder = os.path.dirname(os.path.join(self._view.cwd, os.fsdecode(path)))
        return folder == os.path.abspath(tempfile.gettempdir()) and is_folder(os.path.realpath(folder))

    def _as_it_is(self, path: Any) -> Any:
        """The path of a temporary file or directory, which native code may get by name."""
        self._view.keep_as_is(str(self._view.resolve(path)))
        return self._view.plain(path)

    def _make(self, original: Function) -> Function:
        def makes(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            path = self._view.whole(path, dir_fd)
            original(self._as_it_is(path) if self._is_temporary(path) else self._view.making(path), *args, **kwargs)

        return makes

    def _symlink(self, original: Function) -> Function:
        def links(src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            original(src, self._view.making(self._view.whole(dst, dir_fd), link=True), *args, **kwargs)

        return links

    def _link(self, original: Function) -> Function:
        def links(
            src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **kwargs: Any
        ) -> None:
            names = self._view.whole(src, src_dir_fd), self._view.whole(dst, dst_dir_fd)
            original(*self._view.linking(*names, kwargs.get("follow_symlinks", True)), **kwargs)

        return links

    def _move(self, original: Function) -> Function:
        def moves(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            there, here = self._view.moving(self._view.whole(src, src_dir_fd), self._view.whole(dst, dst_dir_fd))
            try:
                original(there, here)
            except OSError as error:
                if error.errno != errno.EXDEV or not self._view.crosses_disks:
                    raise
                shutil.move(there, here)

        return moves

    def _remove(self, original: Function) -> Function:
        folder = original.__name__ == "rmdir"

        def removes(path: Any, *, dir_fd: int | None = None) -> None:
            there = self._view.removing(self._view.whole(path, dir_fd), folder)
            if there is not None:
                original(there)

        return removes

    def _native(self, place: int, mode: native_files.Mode) -> Callable[[Function], Function]:
        """Redirect a function whose argument number `place` is a path."""

        def stands_in(original: Function) -> Function:
            @functools.wraps(original)
            def takes(*args: Any, **kwargs: Any) -> Any:
                how = mode(args, kwargs) if callable(mode) else mode
                found = [self._view.opening(a, how) if n == place and is_path(a) else a for n, a in enumerate(args)]
                for name in native_files.KEYWORDS:
                    if is_path(kwargs.get(name)):
                        kwargs[name] = self._view.opening(kwargs[name], how)
                return original(*found, **kwargs)

            return takes

        return stands_in

    def _database(self, original: Function) -> Function:
        def connects(database: Any, *args: Any, **kwargs: Any) -> Any:
            found = native_files.database(database, kwargs.get("uri", False))
            if found is not None:
                path, mode, query = found
                for end in native_files.BESIDE:
                    with contextlib.suppress(FileNotFoundError):
                        self._view.opening(path + end, mode)
                database = native_files.address(self._view.opening(path, mode), query)
            return original(database, *args, **kwargs)

        return connects

    def install(self, patches: Patches) -> None:
        """Patch the functions that write and read files."""
        for owner, name in ((builtins, "open"), (io, "open"), (tarfile, "bltn_open"), (bz2, "_builtin_open")):
            patches.replace(owner, name, self._open)
        accessor = getattr(pathlib, "_normal_accessor", None)  # Python 3.10 keeps its own references
        places: tuple[Any, ...] = (os, accessor)
        for name, make in self._table().items():
            before = getattr(os, name, None)
            for owner in places:
                if hasattr(owner, name):
                    patches.replace(owner, name, self._open if owner is accessor and name == "open" else make)
            for functions in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
                if before in functions:  # shutil looks there
                    functions.add(getattr(os, name))
        openers = numpy.lib._datasource._file_openers._file_openers  # type: ignore[attr-defined]
        patches.callback(openers.__setitem__, None, openers[None])
        openers[None] = builtins.open
        native_files.install(patches, self._native, self._database)

    def _table(self) -> dict[str, Callable[[Function], Function]]:
        """Functions of `os`, and what makes their replacements."""
        return {
            **dict.fromkeys(("mkdir", "mkfifo", "mknod"), self._make),
            **dict.fromkeys(("rename", "replace"), self._move),
            **dict.fromkeys(("remove", "unlink", "rmdir"), self._remove),
            "link": self._link,
            "symlink": self._symlink,
            "open": self._open_number,
            "truncate": lambda original: lambda path, length: original(self._view.opening(path, "r+"), length),
        }


class OverlayRedirection(FileRedirection):
    """The same on a worker other than rank 0, and those that read or list files.

    Args:
        view: this worker's.
        starts_child: called before the worker starts a process.
    """

    def __init__(self, view: Overlay, starts_child: Callable[[], None]) -> None:
        super().__init__(view)
        self._overlay, self._starts_child = view, starts_child

    def _at(self, place: Callable[[Any, bool], Any]) -> Callable[[Function], Function]:
        """Redirect the first argument to `place(path, follows)`; where that is None, nothing is to be done."""

        def stands_in(original: Function) -> Function:
            follows = original.__name__ not in OF_LINKS

            def calls(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
                there = place(self._view.whole(path, dir_fd), follows and kwargs.get("follow_symlinks", True))
                return None if there is None else original(there, *args, **kwargs)

            return calls

        return stands_in

    def _access(self, original: Function) -> Function:
        def access(*args: Any, **kwargs: Any) -> bool:
            try:
                return bool(self._at(self._overlay.reading)(original)(*args, **kwargs))
            except FileNotFoundError:
                return False

        return access

    def _list(self, original: Function) -> Function:
        def lists(path: Any = ".") -> list[Any]:
            there, _, names = self._listed(path)
            if names is None:
                return sorted(original(there))
            return [os.fsencode(one) for one in names] if isinstance(path, bytes) else names

        return lists

    def _scan(self, original: Function) -> Function:
        def scans(path: Any = ".") -> Any:
            there, name, names = self._listed(path)
            if names is None:
                return Entries(sorted(original(there), key=lambda entry: entry.name))
            return Entries(OverlayEntry(path, str(name), one) for one in names)

        return scans

    def _listed(self, path: Any) -> tuple[Any, str | None, list[str] | None]:
        """The directory to list instead, its name, and the worker's own entries in place of the system's."""
        path = "." if path is None else path
        name = self._view.opened(path) if isinstance(path, int) else self._view.resolve(path)
        if name is None:
            return self._overlay.plain(path), None, None
        return path if isinstance(path, int) else self._overlay.reading(path), name, self._overlay.names(name)

    def _child(self, original: Function) -> Function:
        def starts(*args: Any, **kwargs: Any) -> Any:
            self._starts_child()
            if is_path(kwargs.get("cwd")):
                kwargs["cwd"] = self._overlay.for_child(kwargs["cwd"])
            return original(*args, **kwargs)

        return starts

    def install(self, patches: Patches) -> None:
        super().install(patches)
        patches.replace(subprocess.Popen, "__init__", self._child)

    def _table(self) -> dict[str, Callable[[Function], Function]]:
        return {
            **super()._table(),
            **dict.fromkeys(READS, self._at(self._overlay.reading)),
            **dict.fromkeys(TOUCHES, self._at(self._overlay.touching)),
            **dict.fromkeys(("system", "posix_spawn", "posix_spawnp"), self._child),
            **dict.fromkeys(("chdir", "fchdir"), lambda original: self._overlay.go),
            "access": self._access,
            "listdir": self._list,
            "scandir": self._scan,
            "getcwd": lambda original: lambda: self._view.cwd,
            "getcwdb": lambda original: lambda: os.fsencode(self._view.cwd),
        }


def _mode(flags: int) -> str:
    """The mode of Python's `open` that treats a file as these flags of `os.open` do."""
    creates, cuts = flags & os.O_CREAT, flags & os.O_TRUNC
    if creates and flags & os.O_EXCL:
        return "x"
    if not flags & (os.O_WRONLY | os.O_RDWR | os.O_APPEND) and not creates and not cuts:
        return "r"
    return ("w" if cuts else "a") if creates else "r+"
