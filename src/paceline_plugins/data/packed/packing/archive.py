# SPDX-License-Identifier: Apache-2.0
"""Tar archives, plain or compressed: members that follow each other and share a key are one sample (WebDataset)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from paceline.errors import DataError
from paceline_plugins.data.packed.packing.base import (
    ORIGIN,
    FileSource,
    Members,
    Ready,
    Stream,
    Task,
    no_shuffle,
    origin,
    reading,
    too_large,
)
from paceline_plugins.data.packed.tar import TarMember, TarStream, split_name


class TarSource(FileSource):
    """The samples of archives; memory holds one of them."""

    def __init__(self, paths: Sequence[Path], largest: int) -> None:
        super().__init__(paths, largest)
        self._hidden = 0
        self._together = False  # some sample has several members
        self._extensions: set[str] = set()  # up to five of them

    def tasks(self, seed: int | None) -> Iterator[Task]:
        """One task for each run of members with one key."""
        if seed is not None:
            raise no_shuffle(str(self._paths[0]), "a tar")
        for number, path in enumerate(self._paths):
            stream = Stream(self._paths, number, self.progress)
            with stream as file, reading(path):
                for sample in self._grouped(TarStream(file, str(path), self._largest), str(path)):
                    stream.update()
                    yield Ready(sample)
                self._drain(file, path)
        if self._hidden:
            self.progress.notes.append(f"{self._hidden} hidden member(s) were left out")
        if len(self._extensions) > 1 and not self._together:
            self.progress.notes.append(
                f"every sample has one member ({', '.join(sorted(self._extensions))}): members of a sample must follow "
                "each other; make the archive with tar --sort=name if they belong together"
            )

    def _drain(self, file: BinaryIO, path: Path) -> None:
        """Read past the end mark: a compressed file has its checksum there, and another archive may follow."""
        followed = False
        while piece := file.read(1 << 20):
            followed = followed or piece.count(0) < len(piece)
        if followed:
            self.progress.notes.append(f"{path} goes on after its end mark; what follows was not read (cut it apart)")

    def _grouped(self, members: TarStream, name: str) -> Iterator[Members]:
        for key, group in groupby(self._visible(members), lambda member: split_name(member.name)[0]):
            sample: Members = {}
            for member in group:
                self._add(sample, member, name)
            sample.setdefault(ORIGIN, origin(key))
            yield sample

    def _visible(self, members: TarStream) -> Iterator[TarMember]:
        for member in members:
            if member.name.rpartition("/")[2].startswith("."):
                self._hidden += 1
            else:
                yield member

    def _add(self, sample: Members, member: TarMember, name: str) -> None:
        extension = split_name(member.name)[1].lower()
        extension = re.sub(r"[^A-Za-z0-9_.-]|\.(?=\.|$)|^\.", "_", extension) or "bin"
        if extension in sample:
            raise DataError(
                f"{name} at byte {member.offset}: {member.name!r} is the sample's second member of this kind; rename it"
            )
        if sum(map(len, sample.values())) + len(member.data) > self._largest:
            where = f"{name} at byte {member.offset}: the sample of {member.name!r}"
            raise too_large(f"{where} has more than {self._largest} bytes")
        self._together = self._together or bool(sample)
        if len(self._extensions) < 5:
            self._extensions.add(extension)
        sample[extension] = member.data
