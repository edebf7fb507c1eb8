# SPDX-License-Identifier: Apache-2.0
"""Samples -> shards, their offsets and the index."""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from paceline.errors import DataError
from paceline_plugins.data.packed.index import INDEX, Index, PackedShard, offsets_to_bytes
from paceline_plugins.data.packed.tar import END, make_header, padding

EXTENSION = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
LONGEST_EXTENSION = 64


class ShardWriter:
    """Writes samples into a directory; memory holds one sample and the offsets of one shard.

    Args:
        directory: exists and is empty.
        shard_bytes: most bytes of a shard; one sample may be larger.
    """

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self._directory, self._shard_bytes = directory, shard_bytes
        self._shards: list[PackedShard] = []
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._offsets = array("q")
        self.samples, self.bytes = 0, 0

    def add(self, members: Mapping[str, bytes]) -> None:
        """Write a sample: extension -> bytes; DataError if it has no member, or an extension that a tar cannot hold."""
        if not members:
            raise DataError(f"sample {self.samples} has no member; leave it out of the source")
        for extension in members:
            if len(extension) > LONGEST_EXTENSION or not EXTENSION.fullmatch(extension):
                raise DataError(f"sample {self.samples}: no shard can hold the extension {extension!r}; rename it")
        pieces = []
        for extension, data in members.items():
            pieces += [make_header(f"{self.samples:09d}.{extension}", len(data)), data, bytes(padding(len(data)))]
        size = sum(map(len, pieces))
        if self._file is not None and self._offsets[-1] + size + len(END) > self._shard_bytes:
            self._end_shard()
        if self._file is None:
            self._begin_shard()
        for piece in pieces:
            self._write(piece)
        self._offsets.append(self._offsets[-1] + size)
        self.samples += 1
        self.bytes += size

    def finish(self) -> Index:
        """Close the last shard and write the index."""
        if self._file is not None:
            self._end_shard()
        index = Index(tuple(self._shards))
        _write_file(self._directory / INDEX, index.to_json().encode())
        return index

    def abandon(self) -> None:
        """Close open files; the caller removes the directory."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def shards(self) -> int:
        """Shards begun so far."""
        return len(self._shards) + (self._file is not None)

    def _name(self) -> str:
        return f"shard-{len(self._shards):05d}.tar"

    def _begin_shard(self) -> None:
        self._file = (self._directory / self._name()).open("xb", buffering=1 << 20)
        self._hash, self._offsets = hashlib.sha256(), array("q", [0])

    def _write(self, piece: bytes) -> None:
        assert self._file is not None
        self._file.write(piece)
        self._hash.update(piece)

    def _end_shard(self) -> None:
        assert self._file is not None
        self._write(END)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        offsets = offsets_to_bytes(np.frombuffer(self._offsets, dtype=np.int64))
        size, count = self._offsets[-1] + len(END), len(self._offsets) - 1
        found = PackedShard(self._name(), size, self._hash.hexdigest(), count, hashlib.sha256(offsets).hexdigest())
        _write_file(self._directory / found.offsets_name, offsets)
        self._shards.append(found)


def _write_file(path: Path, raw: bytes) -> None:
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
