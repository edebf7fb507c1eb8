# SPDX-License-Identifier: Apache-2.0
"""Only rank 0 writes the program's files; every other worker has an overlay of its own (:mod:`.overlay`).

Patched are Python's `open` and the functions of `os` that take a path, on which most libraries build (`pathlib`,
`shutil`, `glob`, `tempfile`, `logging`, NumPy, PIL, matplotlib, csv, TensorBoard's writer), and the native writers and
readers of torch, safetensors and sqlite3. Other native libraries (HDF5, OpenCV) bypass the overlay. All workers list
directories in sorted order, since the file system's order may differ between hosts.
"""

from __future__ import annotations

import builtins
import bz2
import errno
import io
import os
import pathlib
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from paceline.doors.zero.callers import calling_module
from paceline.doors.zero.listing import Entries, OverlayEntry
from paceline.doors.zero.overlay import Overlay, is_real_folder, missing, process_began
from paceline.doors.zero.patches import Patches

FOLDER = "files"
"""Folder in the log directory for the files of all ranks but 0."""
READS = ("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr")
"""Functions of `os` that read the metadata of their first argument."""
TOUCHES = ("chmod", "chown", "lchown", "utime", "setxattr", "removexattr")
"""Functions that change a file's metadata, not its content."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

Function = Callable[..., Any]


class FileRedirection:
    """Replacements for the functions that take paths, on a worker other than rank 0.

    Args:
        logs: the run's log directory.
        rank: of this worker.
        began: files created later are hidden from this worker; None: when the process began.
        alone: whether the process runs this worker only.
    """

    def __init__(self, logs: Path, rank: int, began: float | None = None, alone: bool = True) -> None:
        folder = Path(os.path.abspath(logs)) / FOLDER / f"rank-{rank:03d}"
        shutil.rmtree(folder, ignore_errors=True)  # a restart resumes from rank 0's files
        self._overlay = Overlay(folder, logs, process_began() if began is None else began, os.chdir if alone else None)

    # -- opening ----------------------------------------------------------------------------------

    def _open(self, original: Function) -> Function:
        def opens(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            opener = kwargs.get("opener") or (args[5] if len(args) > 5 else None)
            if not isinstance(mode, str) or opener is not None:
                return original(file, mode, *args, **kwargs)  # the opener gets the path as given
            if "x" in mode:
                return original(self._overlay.to_make(file), mode, *args, **kwargs)
            if set(mode) & set("wa+"):
                if not set(mode) & set("wa"):
                    self._overlay.to_read(file)  # must exist
                return original(self._overlay.to_write(file, keeps="w" not in mode), mode, *args, **kwargs)
            return original(self._overlay.to_open(file), mode, *args, **kwargs)

        return opens

    def _open_number(self, original: Function) -> Function:
        def opens(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            number: int
            if dir_fd is not None or flags & getattr(os, "O_TMPFILE", 0) == getattr(os, "O_TMPFILE", -1):
                number = original(path, flags, mode, dir_fd=dir_fd)
            elif self._is_temporary(path):
                number = original(self._overlay.plain(path), flags, mode)
                self._overlay.keep_as_is(path)
            elif flags & os.O_CREAT and flags & os.O_EXCL:
                number = original(self._overlay.to_make(path), flags, mode)
            elif flags & WRITES:
                if not flags & os.O_CREAT:
                    self._overlay.to_read(path)
                number = original(self._overlay.to_write(path, keeps=not flags & os.O_TRUNC), flags, mode)
            else:
                number = original(self._overlay.to_open(path), flags, mode)
            return number

        return opens

    def _is_temporary(self, path: Any) -> bool:
        """Whether `tempfile` asks, for a file with a unique name in a shared folder."""
        name = self._overlay.name(path)
        if name is None or calling_module(1) != "tempfile":
            return False
        folder = os.path.dirname(name)  # shared even if the worker has its own copy
        return self._overlay.sees(folder) or not self._overlay.is_own(folder)

    # -- functions of os --------------------------------------------------------------------------

    def _read(self, original: Function) -> Function:
        def reads(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:
                return original(path, *args, **kwargs)
            try:
                found = self._overlay.to_read(path)
            except FileNotFoundError:
                if original.__name__ == "access":
                    return False
                raise
            return original(found, *args, **kwargs)

        return reads

    def _touch(self, original: Function) -> Function:
        def touches(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:
                return original(path, *args, **kwargs)
            name = self._overlay.name(path)
            if name is None:
                return original(self._overlay.plain(path), *args, **kwargs)
            if self._overlay.is_own(name):
                return original(self._overlay.own(name), *args, **kwargs)
            if not self._overlay.sees(name):
                raise missing(path)
            return None  # rank 0 does it

        return touches

    def _truncate(self, original: Function) -> Function:
        return lambda path, length: original(self._overlay.to_write(path, keeps=True), length)

    def _make_folder(self, original: Function) -> Function:
        def makes(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None:
                original(path, mode, dir_fd=dir_fd)
            elif self._is_temporary(path):
                original(self._overlay.plain(path), mode)
                self._overlay.keep_as_is(path)
            else:
                original(self._overlay.to_make(path), mode)

        return makes

    def _make_link(self, original: Function) -> Function:
        def links(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            if original.__name__ == "link":
                source = self._overlay.to_read(source)
            elif os.path.isabs(os.fsdecode(source)) and (name := self._overlay.name(source)) is not None:
                source = self._overlay.own(name) if self._overlay.is_own(name) else source
            original(source, self._overlay.to_make(target), *args, **kwargs)

        return links

    def _move(self, original: Function) -> Function:
        def moves(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs:
                original(source, target, *args, **kwargs)
                return
            old, new = self._overlay.name(source), self._overlay.name(target)
            if old is not None and not self._overlay.is_own(old):
                self._copy_as(source, old, target, new)
                return
            there = self._overlay.plain(source) if old is None else self._overlay.own(old)
            here = self._over(target, new, there)
            try:
                original(there, here)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                (shutil.copytree if is_real_folder(there) else shutil.copy2)(there, here)
                (shutil.rmtree if is_real_folder(there) else os.unlink)(there)
            if old is not None and self._overlay.sees(old):
                self._overlay.remove(old)

        return moves

    def _over(self, target: Any, new: str | None, there: Any) -> Any:
        """The real target of a move."""
        if new is not None and is_real_folder(there) and not self._overlay.is_own(new):
            if self._overlay.sees(new) and self._overlay.names(new):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
            self._overlay.remove(new)
        return self._overlay.to_write(target)

    def _copy_as(self, source: Any, old: str, target: Any, new: str | None) -> None:
        """Move a file of rank 0: rank 0 moves it, and this worker keeps a copy."""
        if not self._overlay.sees(old):
            if new is not None and self._overlay.sees(new) and not self._overlay.was_removed(old):
                return  # rank 0 has moved it already
            raise missing(source)
        if is_real_folder(old):
            self._overlay.remove(new) if new is not None else None
            shutil.copytree(old, self._overlay.to_write(target))
        else:
            shutil.copy2(old, self._overlay.to_write(target))
        self._overlay.remove(old)

    def _remove(self, original: Function) -> Function:
        def removes(path: Any, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None:
                return original(path, dir_fd=dir_fd)  # type: ignore[no-any-return]
            name = self._overlay.name(path)
            if name is None:
                return original(self._overlay.plain(path))  # type: ignore[no-any-return]
            if self._overlay.was_removed(name) and not self._overlay.is_own(name):
                raise missing(path)
            if original.__name__ == "rmdir" and self._overlay.names(name):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            if self._overlay.is_own(name):
                original(self._overlay.own(name))
            self._overlay.remove(name)  # rank 0 removes it, and may have done so already

        return removes

    def _remove_tree(self, original: Function) -> Function:
        def removes(path: Any, *args: Any, **kwargs: Any) -> None:
            name = self._overlay.name(path) if kwargs.get("dir_fd") is None else None
            if name is None:
                original(path, *args, **kwargs)
                return
            if self._overlay.is_own(name):
                original(self._overlay.own(name), *args, **kwargs)
            elif self._overlay.was_removed(name) and not (args[:1] == (True,) or kwargs.get("ignore_errors")):
                raise missing(path)
            self._overlay.remove(name)

        return removes

    # -- directories ------------------------------------------------------------------------------

    def _list(self, original: Function) -> Function:
        def lists(path: Any = ".") -> list[Any]:
            if isinstance(path, int):
                return original(path)  # type: ignore[no-any-return]
            name = self._overlay.name(path)
            names = None if name is None else self._overlay.names(name)
            if names is None:
                return sorted(original(self._overlay.to_read(path)))
            return [os.fsencode(one) for one in names] if isinstance(path, bytes) else names

        return lists

    def _scan(self, original: Function) -> Function:
        def scans(path: Any = ".") -> Any:
            if isinstance(path, int):
                return original(path)
            name = self._overlay.name(path)
            names = None if name is None else self._overlay.names(name)
            if name is None or names is None:
                return Entries(sorted(original(self._overlay.to_read(path)), key=lambda entry: entry.name))
            return Entries(OverlayEntry(path, one) for one in names)

        return scans

    def _getcwd(self, original: Function) -> Function:
        return lambda: self._overlay.cwd

    # -- native writers ---------------------------------------------------------------------------

    def _native(self, place: int, writes: bool) -> Callable[[Function], Function]:
        """Redirect a function whose argument number `place` is a path."""

        def stands_in(original: Function) -> Function:
            def takes(*args: Any, **kwargs: Any) -> Any:
                instead = self._overlay.to_write if writes else self._overlay.to_open
                found = [instead(a) if n == place and _is_path(a) else a for n, a in enumerate(args)]
                for name in ("f", "filename", "file"):
                    if _is_path(kwargs.get(name)):
                        kwargs[name] = instead(kwargs[name])
                return original(*found, **kwargs)

            return takes

        return stands_in

    def _database(self, original: Function) -> Function:
        def connects(database: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_path(database) and os.fsdecode(database) not in ("", ":memory:") and not kwargs.get("uri"):
                database = self._overlay.to_write(database, keeps=True)
            return original(database, *args, **kwargs)

        return connects

    def _child(self, original: Function) -> Function:
        def starts(*args: Any, **kwargs: Any) -> Any:
            self._overlay.starts_child()
            return original(*args, **kwargs)

        return starts

    # -- all together -----------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Patch the functions that write and read files."""
        for owner, name in ((builtins, "open"), (io, "open"), (tarfile, "bltn_open"), (bz2, "_builtin_open")):
            patches.replace(owner, name, self._open)
        table: dict[str, Callable[[Function], Function]] = {
            **dict.fromkeys(READS, self._read),
            **dict.fromkeys(TOUCHES, self._touch),
            **dict.fromkeys(("rename", "replace"), self._move),
            **dict.fromkeys(("remove", "unlink", "rmdir"), self._remove),
            **dict.fromkeys(("symlink", "link"), self._make_link),
            **dict.fromkeys(("system", "posix_spawn", "posix_spawnp"), self._child),
            "open": self._open_number,
            "truncate": self._truncate,
            "mkdir": self._make_folder,
            "listdir": self._list,
            "scandir": self._scan,
            "getcwd": self._getcwd,
            "chdir": lambda original: self._overlay.go,
        }
        accessor = getattr(pathlib, "_normal_accessor", None)  # Python 3.10 keeps its own references
        places: tuple[Any, ...] = (os, accessor)
        for name, make in table.items():
            for owner in places:
                if hasattr(owner, name):
                    patches.replace(owner, name, self._open if owner is accessor and name == "open" else make)
        patches.replace(shutil, "rmtree", self._remove_tree)
        patches.replace(subprocess.Popen, "__init__", self._child)
        self._install_native(patches)

    def _install_native(self, patches: Patches) -> None:
        openers = numpy.lib._datasource._file_openers._file_openers  # type: ignore[attr-defined]
        patches.callback(openers.__setitem__, None, openers[None])
        openers[None] = builtins.open
        saves, loads = ((torch, "save"), (torch.jit, "save")), ((torch, "load"), (torch.jit, "load"))
        for owner, name in (*saves, (torch.export, "save"), (torch.jit._script.RecursiveScriptModule, "save")):
            patches.replace(owner, name, self._native(1, writes=True))
        for owner, name in (*loads, (torch.export, "load"), (safetensors, "safe_open")):
            patches.replace(owner, name, self._native(0, writes=False))
        modules: tuple[Any, ...] = (safetensors.torch, safetensors.numpy)
        for module in modules:
            patches.replace(module, "save_file", self._native(1, writes=True))
            patches.replace(module, "load_file", self._native(0, writes=False))
        patches.replace(safetensors.torch, "safe_open", self._native(0, writes=False))
        try:
            import sqlite3
        except ImportError:
            return
        for owner in (sqlite3, sqlite3.dbapi2):
            patches.replace(owner, "connect", self._database)


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, bytes, os.PathLike))
