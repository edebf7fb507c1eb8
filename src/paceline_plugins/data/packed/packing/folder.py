# SPDX-License-Identifier: Apache-2.0
"""A folder: files of one folder that differ only in what follows the last dot are one sample.

The parent folder is kept as the sample's class: `cats/0001.jpg` and `cats/0001.txt` become the members jpg, txt and
source.json, which holds {"key": "cats/0001", "class": "cats"}. Hidden files are left out.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from paceline.errors import DataError
from paceline_plugins.data.packed.packing.base import ORIGIN, Members, SourceProgress, Task, origin, reading, too_large
from paceline_plugins.data.packed.storage import read_up_to

_SUFFIX = re.compile(r"[A-Za-z0-9_-]{1,16}")
Group = tuple[str, str, tuple[str, ...]]
"""(folder below the root, stem, file names)."""


class FolderSource:
    """The samples of a folder and its subfolders, in the order of names.

    Without a seed memory holds the names of one folder, with one all names. A sample of more than `largest` bytes is
    refused.
    """

    def __init__(self, root: Path, largest: int) -> None:
        self.root, self._largest = root, largest
        self.progress = SourceProgress()
        self._hidden = 0

    def tasks(self, seed: int | None) -> Iterator[Task]:
        """One task for each group of files."""
        if seed is None:
            for group in self._groups("", ()):
                yield partial(self._read, group)
        else:
            groups = list(self._groups("", ()))
            random.Random(seed).shuffle(groups)
            for number, group in enumerate(groups):
                self.progress.fraction = number / len(groups)
                yield partial(self._read, group)
        if self._hidden:
            self.progress.notes.append(f"{self._hidden} hidden file(s) were left out")

    def _groups(self, below: str, above: tuple[str, ...]) -> Iterator[Group]:
        folder = self.root / below
        real = os.path.realpath(folder)
        if real in above:
            raise DataError(f"{folder} is a link to a folder above itself; remove the link")
        with reading(folder), os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        visible = [entry for entry in entries if not entry.name.startswith(".")]
        self._hidden += len(entries) - len(visible)
        stems: dict[str, list[str]] = {}
        folders = []
        for entry in visible:
            if entry.is_dir():
                folders.append(entry.name)
            elif entry.is_file():
                stems.setdefault(_parts(entry.name)[0], []).append(entry.name)
            else:
                raise DataError(f"{entry.path} is neither a file nor a folder (or a link to nothing); remove it")
        for stem in sorted(stems):
            yield below, stem, tuple(stems[stem])
        for name in folders:
            yield from self._groups(f"{below}/{name}" if below else name, (*above, real))

    def _read(self, group: Group) -> Members:
        below, stem, names = group
        members: Members = {}
        left = self._largest
        for name in names:
            path = self.root / below / name
            extension = _parts(name)[1]
            if extension in members:
                raise DataError(f"{path}: a second file of this sample with the extension {extension!r}; rename one")
            with reading(path), path.open("rb") as file:
                members[extension] = read_up_to(file, left + 1)
            left -= len(members[extension])
            if left < 0:
                raise too_large(f"{path}: the sample has more than {self._largest} bytes")
        members[ORIGIN] = origin(f"{below}/{stem}" if below else stem, **{"class": below})
        return members


def _parts(name: str) -> tuple[str, str]:
    """(stem, extension); the part after the last dot is an extension if it is short and alphanumeric."""
    stem, dot, suffix = name.rpartition(".")
    if dot and stem and _SUFFIX.fullmatch(suffix):
        return stem, suffix.lower()
    return name, "bin"
