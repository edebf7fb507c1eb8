# SPDX-License-Identifier: Apache-2.0
"""JSON lines, plain or compressed: each line is a sample with one member, json."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from paceline.errors import DataError
from paceline_plugins.data.packed.packing.base import (
    FileSource,
    Members,
    Ready,
    Stream,
    Task,
    no_shuffle,
    reading,
    too_large,
)


class JsonlSource(FileSource):
    """The lines of files, without empty ones.

    Without a seed memory holds one line. With one, a first pass records where lines begin (32 bytes each), and the file
    must not be compressed.
    """

    def tasks(self, seed: int | None) -> Iterator[Task]:
        """One task for each line."""
        if seed is not None:
            yield from self._shuffled(seed)
            return
        for _, number, _, line, path in self._lines():
            yield Ready(_sample(line, f"{path} line {number}"))

    def _lines(self) -> Iterator[tuple[int, int, int, bytes, Path]]:
        """(file, line from 1, offset, line, path) of every line that is not empty."""
        for which, path in enumerate(self._paths):
            stream = Stream(self._paths, which, self.progress)
            with stream as file, reading(path):
                number = offset = 0
                while line := file.readline(self._largest + 1):
                    number += 1
                    if len(line) > self._largest:
                        raise too_large(f"{path} line {number}: more than {self._largest} bytes")
                    if not line.endswith(b"\n"):
                        file.read(1)  # raises where a damaged file ends within the line
                    if line.strip():
                        stream.update()
                        yield which, number, offset, line, path
                    offset += len(line)

    def _shuffled(self, seed: int) -> Iterator[Task]:
        for path in self._paths:
            if path.suffix.lower() not in (".jsonl", ".ndjson"):
                raise no_shuffle(str(path), "a compressed file")
        where = array("q")
        for which, number, offset, line, _ in self._lines():
            where.extend((which, len(line), number, offset))
        table = np.frombuffer(where, dtype=np.int64).reshape(-1, 4)
        for position, row in enumerate(np.random.default_rng(seed).permutation(len(table))):
            self.progress.fraction = position / len(table)
            which, length, number, offset = map(int, table[row])
            yield partial(_read_line, self._paths[which], offset, length, number)


def _read_line(path: Path, offset: int, length: int, number: int) -> Members:
    with reading(path), path.open("rb", buffering=0) as file:
        file.seek(offset)
        return _sample(file.read(length), f"{path} line {number}")


def _sample(line: bytes, where: str) -> Members:
    """The line, if it is JSON."""
    try:
        json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON ({error}); correct or remove the line") from error
    return {"json": line.strip()}
