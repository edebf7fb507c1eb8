# SPDX-License-Identifier: Apache-2.0
"""Directory listings: in sorted order, and as an overlay shows them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from paceline_plugins.zero.patches import Patches

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
