# SPDX-License-Identifier: Apache-2.0
"""A worker's view of the file system.

Rank 0 uses the program's own files, and records what it changes (:mod:`.journal`). Another worker sees what was there
when the job began, overlaid with its own writes. These go to a folder of its own, under the absolute name of the file.
It copies up a file that was there before it first writes into it, and remembers what it removes.

Each function takes the program's path, resolves it, and returns the path to give the system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posix
from pathlib import Path
from typing import Any

from paceline_plugins.zero.journal import Journal
from paceline_plugins.zero.paths import Paths, copy, is_folder, is_path, is_there, like, make_folders, upwards


class RealFiles(Paths):
    """Rank 0's view.

    Args:
        logs: the run's log directory, which is not redirected.
        journal: of what rank 0 changes.
    """

    crosses_disks = False
    """Whether a move may lead to another disk where the program's does not."""

    def __init__(self, logs: Path, journal: Journal) -> None:
        super().__init__(logs)
        self._journal = journal

    def plain(self, path: Any, follows: bool = True) -> Any:
        """The path of a file that every worker uses as it is."""
        return path

    def opening(self, path: Any, mode: str) -> Any:
        """To open, in a mode of Python's `open`."""
        if not set(mode).isdisjoint("wxa+") and (name := self.resolve(path, "x" not in mode)) is not None:
            self._journal.writes(name, keeps="w" not in mode)
        return path

    def making(self, path: Any, link: bool = False) -> Any:
        """To create, as a link or not."""
        if (name := self.resolve(path, follows=False)) is not None:
            self._journal.makes(name)
        return path

    def moving(self, source: Any, target: Any) -> tuple[Any, Any]:
        """To rename."""
        for path in (source, target):
            self.removing(path, folder=False)
        if (name := self.resolve(target, follows=False)) is not None:
            self._journal.marks(name)
        return source, target

    def linking(self, source: Any, target: Any, follows: bool) -> tuple[Any, Any]:
        """To give a file a second name, by which it may be written."""
        return self.opening(source, "r+"), self.making(target)

    def removing(self, path: Any, folder: bool) -> Any:
        """To remove, as a directory or not; None: nothing is left to do."""
        if (name := self.resolve(path, follows=False)) is not None:
            self._journal.removes(name)
        return path


class Overlay(RealFiles):
    """Another worker's view.

    Args:
        folder: for its writes.
        logs: the run's log directory, which is not overlaid.
        journal: of what rank 0 changes.
        chdir: changes the directory of the process; None if virtual workers share the process.
    """

    crosses_disks = True

    def __init__(self, folder: Path, logs: Path, journal: Journal, chdir: Any = os.chdir) -> None:
        super().__init__(logs, journal)
        self._folder = os.path.realpath(folder)
        self._removed: set[str] = set()
        self._plain: set[str] = set()  # no links of others lie there
        self._has_links = False  # of its own
        self._cwd, self._chdir, self._at_home = os.getcwd(), chdir, chdir is not None

    # -- names ------------------------------------------------------------------------------------

    @property
    def cwd(self) -> str:
        return self._cwd

    def of_real(self, real: str) -> str:
        for prefix in (self._folder, self._journal.kept):
            if real.startswith(f"{prefix}/"):
                return real[len(prefix) :]
        return real

    def link(self, name: str, inside: bool = False) -> str | None:
        if name in self._plain and not self._has_links:
            return None
        target = super().link(self.own(name)) if self._has_links else None
        if target is None and (super().link(name) or super().link(self._journal.kept + name)):
            found = name if name.startswith("/proc/") else self.find(name)
            target = None if found is None else super().link(found)
        if target is None and inside:
            self._plain.add(name)
        return target

    def above(self, folder: str) -> str:
        if folder and not self.is_folder(folder):
            raise _error(errno.ENOENT, folder)
        return super().above(folder)

    def plain(self, path: Any, follows: bool = True) -> Any:
        if not self._has_links or not is_path(path):
            return self._from_here(path)
        return like(
            path, self._walk(os.path.join(self.cwd, os.fsdecode(path)), follows)
        )  # the kernel knows no own links

    def _from_here(self, path: Any) -> Any:
        return path if self._at_home or not is_path(path) else like(path, os.path.join(self.cwd, os.fsdecode(path)))

    # -- what is there ----------------------------------------------------------------------------

    def own(self, name: str) -> str:
        """Where this worker writes that file."""
        return self._folder + name

    def _there(self, name: str) -> str | None:
        """The real path of what was there when the job began, unless this worker has removed it."""
        if self._removed and not self._removed.isdisjoint(upwards(name)):
            return None
        return self._journal.at_start(name)

    def find(self, name: str) -> str | None:
        """The real path of what this worker sees; None if nothing."""
        own = self.own(name)
        return own if is_there(own) else self._there(name)

    def is_folder(self, name: str) -> bool:
        """Whether it is a directory for this worker."""
        found = self.find(name)
        return found is not None and is_folder(found)

    def names(self, name: str) -> list[str] | None:
        """A directory's entries for this worker, sorted; None if they are the system's."""
        own, there = self.own(name), self._there(name)
        seen = set(posix.listdir(own)) if is_folder(own) else set()
        if there is not None and is_folder(there):
            if not is_folder(own) and not self._removed and self._journal.is_unchanged(name):
                return None
            for folder in (name, self._journal.kept + name):
                with contextlib.suppress(OSError):
                    seen |= {entry for entry in posix.listdir(folder) if self._there(f"{name}/{entry}")}
        return sorted(seen) if is_folder(own) or there is not None else None

    # -- reading and writing ----------------------------------------------------------------------

    def reading(self, path: Any, follows: bool = True) -> Any:
        """To read.

        Raises:
            FileNotFoundError: it does not exist for this worker.
        """
        name = self.resolve(path, follows)
        return self.plain(path, follows) if name is None else self._to_read(name, path)

    def _to_read(self, name: str, path: Any) -> Any:
        found = self._must_find(name, path)
        straight = found == os.path.normpath(os.path.join(self.cwd, os.fsdecode(path)))
        return self._from_here(path) if straight else like(path, found)

    def touching(self, path: Any, follows: bool = True) -> Any:
        """To change in its metadata; None where rank 0 does it."""
        name = self.resolve(path, follows)
        if name is None:
            return self.plain(path, follows)
        return like(path, self.own(name)) if self._must_find(name, path) == self.own(name) else None

    def opening(self, path: Any, mode: str) -> Any:
        name = self.resolve(path, follows="x" not in mode)
        if name is None:
            return self.plain(path)
        if "x" in mode:
            return self.making(path)
        if set(mode).isdisjoint("wa"):
            there = self._to_read(name, path)
            if "+" not in mode:
                return there
        self._check_place(name, path)
        if self.is_folder(name):
            raise _error(errno.EISDIR, path)
        return like(path, self.own(name) if "w" in mode else self._copied_up(name))

    def making(self, path: Any, link: bool = False) -> Any:
        self._has_links = self._has_links or link
        name = self.resolve(path, follows=False)
        if name is None:
            return self.plain(path, follows=False)
        if self.find(name) is not None:
            raise _error(errno.EEXIST, path)
        self._check_place(name, path)
        return like(path, self.own(name))

    def moving(self, source: Any, target: Any) -> tuple[Any, Any]:
        old, new = self.resolve(source, follows=False), self.resolve(target, follows=False)
        there, here = self.plain(source, follows=False), self.plain(target, follows=False)
        if old is not None:
            self._must_find(old, source)
            there = self._copied_up(old)
        if new is not None and new != old:
            self._check_replacement(new, target, is_folder(os.fsdecode(there)))
            here = self.own(new)
        if old is not None and old != new:
            self._removed.add(old)
        return there, here

    def linking(self, source: Any, target: Any, follows: bool) -> tuple[Any, Any]:
        old = self.resolve(source, follows)
        if old is None:
            return self.plain(source, follows), self.making(target)
        self._must_find(old, source)
        return self._copied_up(old), self.making(target)

    def removing(self, path: Any, folder: bool) -> Any:
        name = self.resolve(path, follows=False)
        if name is None:
            return self.plain(path, follows=False)
        found = self._must_find(name, path)
        if is_folder(found) is not folder:
            raise _error(errno.ENOTDIR if folder else errno.EISDIR, path)
        if folder and self._entries(name):
            raise _error(errno.ENOTEMPTY, path)
        self._removed.add(name)
        return like(path, found) if found == self.own(name) else None

    def _must_find(self, name: str, path: Any) -> str:
        found = self.find(name)
        if found is None:
            raise _error(errno.ENOENT, path)
        return found

    def _check_place(self, name: str, path: Any) -> None:
        """Refuse a file whose directory does not exist; else make this worker's."""
        if not self.is_folder(os.path.dirname(name)):
            raise _error(errno.ENOENT, path)
        make_folders(os.path.dirname(self.own(name)))

    def _check_replacement(self, name: str, path: Any, folder: bool) -> None:
        """Refuse to move a directory over a file or over files, or a file over a directory."""
        if self.find(name) is not None and self.is_folder(name) is not folder:
            raise _error(errno.ENOTDIR if folder else errno.EISDIR, path)
        if folder and self._entries(name):
            raise _error(errno.ENOTEMPTY, path)
        self._check_place(name, path)
        if folder:  # nothing of an earlier directory shows below it
            self._removed.add(name)

    def _entries(self, name: str) -> list[str]:
        found, names = self.find(name), self.names(name)
        return names if names is not None else posix.listdir(found) if found is not None and is_folder(found) else []

    def _copied_up(self, name: str) -> str:
        """This worker's path of a file or a directory, with all that is in it."""
        own, found = self.own(name), self.find(name)
        if found is not None and is_folder(found):
            make_folders(own)
            for entry in self._entries(name):
                self._copied_up(f"{name}/{entry}")
        elif found is not None and found != own:
            self._has_links = self._has_links or super().link(found) is not None
            copy(found, own)
        return own

    # -- where the worker is ----------------------------------------------------------------------

    def go(self, path: Any) -> None:
        """`os.chdir`."""
        given = self.opened(path) if isinstance(path, int) else path
        name, real = self.resolve(given), self.for_child(given)
        real = os.path.realpath(real) if name is None else real
        if not is_folder(real):
            raise _error(errno.ENOTDIR, path)
        if self._chdir is not None:
            self._chdir(real)
        self._cwd = real if name is None else name
        self._at_home = self._chdir is not None and real == self._cwd

    def for_child(self, path: Any) -> Any:
        """The directory for native code and child processes, which see the program's own where there is one."""
        name = self.resolve(path)
        if name is None:
            return self.plain(path)
        found = self._must_find(name, path)
        return name if self._there(name) == name else found


def _error(code: int, path: Any) -> OSError:
    """As the system raises it."""
    return OSError(code, os.strerror(code), path)
