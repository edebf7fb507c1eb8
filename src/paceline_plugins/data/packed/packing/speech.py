# SPDX-License-Identifier: Apache-2.0
"""Samples from Kaldi's ark and scp files; source.json keeps the utterance's name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from paceline.errors import DataError
from paceline_plugins.data.packed.packing.base import (
    ORIGIN,
    FileSource,
    Members,
    Ready,
    SourceProgress,
    Task,
    no_shuffle,
    origin,
    reading,
)
from paceline_plugins.data.packed.packing.kaldi import Reader
from paceline_plugins.data.packed.storage import read_up_to


class ArkSource(FileSource):
    """The values of archives, one after another."""

    def tasks(self, seed: int | None) -> Iterator[Task]:
        """One task for each utterance."""
        if seed is not None:
            raise no_shuffle(str(self._paths[0]), "an ark (its scp can be shuffled)")
        for which, path in enumerate(self._paths):
            with reading(path), path.open("rb") as file:
                size = max(1, path.stat().st_size)
                reader = Reader(file, str(path), self._largest)
                while (key := reader.key()) is not None:
                    yield Ready({**reader.value(), ORIGIN: origin(key)})
                    self.progress.fraction = (which + file.tell() / size) / len(self._paths)


class ScpSource:
    """The utterances of a list, in its order or in a seeded one; with a seed memory holds all lines.

    A line is `utt path:offset` or `utt path`. A value of more than `largest` bytes is refused.
    """

    def __init__(self, path: Path, largest: int) -> None:
        self._path, self._largest = path, largest
        self.progress = SourceProgress()

    def tasks(self, seed: int | None) -> Iterator[Task]:
        """One task for each line."""
        if seed is None:
            for number, line in self._lines():
                yield partial(self._read, number, line)
            return
        lines = list(self._lines())
        for position, chosen in enumerate(np.random.default_rng(seed).permutation(len(lines))):
            self.progress.fraction = position / len(lines)
            yield partial(self._read, *lines[chosen])

    def _lines(self) -> Iterator[tuple[int, str]]:
        with reading(self._path), self._path.open("rb") as file:
            size = max(1, self._path.stat().st_size)
            for number, raw in enumerate(file, 1):
                self.progress.fraction = file.tell() / size
                if line := raw.decode("utf-8", "surrogateescape").strip():
                    yield number, line

    def _read(self, number: int, line: str) -> Members:
        where = f"{self._path} line {number}"
        key, _, location = line.partition(" ")
        location = location.strip()
        if not location:
            raise DataError(f"{where}: {line[:80]!r} is not `utt path:offset`; correct or remove the line")
        if location.endswith("|") or location.startswith("|"):
            raise DataError(f"{where}: {location[:80]!r} is a command, which is never run; write an ark with it first")
        if location.endswith("]"):
            raise DataError(
                f"{where}: {location[-80:]!r} asks for a part of a matrix; write an ark with copy-feats first"
            )
        found = re.fullmatch(r"(.+):([0-9]+)", location)
        path, offset = (found[1], int(found[2])) if found else (location, None)
        return {**self._value(self._find(path, where), offset, where), ORIGIN: origin(key)}

    def _find(self, name: str, where: str) -> Path:
        """A path, relative to the working directory as in Kaldi, or to the list."""
        for path in (Path(name), self._path.parent / name):
            if path.is_file():
                return path
        raise DataError(f"{where}: {name} does not exist, seen from here or from the list; correct the path")

    def _value(self, path: Path, offset: int | None, where: str) -> Members:
        with reading(path), path.open("rb") as file:
            first = file.read(2)
            if offset is None and first != b"\0B":  # a file of its own: wav, flac, ...
                raw = first + read_up_to(file, self._largest)
                suffix = path.suffix[1:].lower()
                if len(raw) > self._largest or not re.fullmatch("[a-z0-9_-]{1,16}", suffix):
                    raise DataError(f"{where}: {path} is no value of an ark, and has no extension or is too large")
                return {suffix: raw}
            file.seek(offset or 0)
            return Reader(file, f"{path} ({where})", self._largest).value()
