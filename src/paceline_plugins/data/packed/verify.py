# SPDX-License-Identifier: Apache-2.0
"""Verifies a packed data set against its index: reads every shard once, local or remote."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.urls import shown
from paceline.errors import DataError
from paceline_plugins.data.packed.index import INDEX, LARGEST_INDEX, Index, PackedShard, offsets_from_bytes
from paceline_plugins.data.packed.storage import Storage, local_path
from paceline_plugins.data.packed.tar import BLOCK, END, padding, parse_header

PIECE = 1 << 20
MOST_JOBS = 256


@dataclass(frozen=True)
class Damage:
    """The faults of one shard, a sentence each."""

    shard: str
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The result of `verify`."""

    index: Index
    damaged: tuple[Damage, ...]
    notes: tuple[str, ...]


def read_index(storage: Storage) -> Index:
    """The index of a data set; DataError if it is missing or damaged."""
    return Index.from_json(storage.read(INDEX, LARGEST_INDEX), shown(storage.where(INDEX)))


def verify(
    storage: Storage,
    *,
    jobs: int = 1,
    on_shard: Callable[[PackedShard], None] = lambda shard: None,
) -> Report:
    """Check every shard against the index; DataError if there is no sound index.

    `jobs` shards are read at once; `on_shard` is called after each.
    """
    index = read_index(storage)

    def check(shard: PackedShard) -> Damage | None:
        faults = tuple(_whole(storage, shard))
        on_shard(shard)
        return Damage(shard.name, faults) if faults else None

    with ThreadPoolExecutor(max(1, jobs), "verify") as pool:
        try:
            damaged = tuple(filter(None, pool.map(check, index.shards)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Report(index, damaged, tuple(_unknown_files(storage, index)))


def _unknown_files(storage: Storage, index: Index) -> Iterator[str]:
    """Note files that are not in the index."""
    if not storage.remote:
        known = {INDEX, *(s.name for s in index.shards), *(s.offsets_name for s in index.shards)}
        names = sorted(p.name for p in local_path(storage.root).iterdir() if p.name not in known)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"not in the index, so never read: {', '.join(names[:3])}{more}"


def _whole(storage: Storage, shard: PackedShard) -> Iterator[str]:
    try:
        offsets = _offsets(storage, shard)
    except DataError as error:
        yield str(error)
        offsets = None
    try:
        with storage.open(shard.name) as file:
            reader = _Hashing(file)
            fault = _walk(reader, shard, offsets)
            while reader.read(PIECE):
                pass
    except DataError as error:
        yield str(error)
        return
    if reader.bytes != shard.bytes:
        yield f"{shard.name} has {reader.bytes} bytes, the index says {shard.bytes}"
    elif reader.sha256.hexdigest() != shard.sha256:
        yield f"{shard.name} has sha256 {reader.sha256.hexdigest()[:16]}..., the index says {shard.sha256[:16]}..."
    if fault:
        yield fault


def _offsets(storage: Storage, shard: PackedShard) -> NDArray[np.int64]:
    raw = storage.read(shard.offsets_name, shard.offsets_bytes)
    offsets = offsets_from_bytes(raw, shard, storage.where(shard.offsets_name))
    seen = hashlib.sha256(raw).hexdigest()
    if seen != shard.offsets_sha256:
        raise DataError(
            f"{shard.offsets_name} has sha256 {seen[:16]}..., the index says {shard.offsets_sha256[:16]}..."
        )
    return offsets


class _Hashing:
    """A file whose SHA-256 is computed while it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256, self.bytes = file, hashlib.sha256(), 0

    def read(self, count: int) -> bytes:
        """At most `count` bytes."""
        raw = self._file.read(count)
        self.sha256.update(raw)
        self.bytes += len(raw)
        return raw


def _walk(file: _Hashing, shard: PackedShard, offsets: NDArray[np.int64] | None) -> str:
    """Follow the headers; the first fault, or ""."""
    key, samples = "", 0
    while True:
        at = file.bytes
        try:
            header = parse_header(file.read(BLOCK), f"{shard.name} at byte {at}")
        except DataError as error:
            return str(error)
        if header is None:
            break
        next_key = header.name.partition(".")[0]
        if next_key != key:
            if offsets is not None and (samples >= shard.samples or offsets[samples] != at):
                return f"{shard.name} has a sample at byte {at}, where {shard.offsets_name} has none"
            key, samples = next_key, samples + 1
        left = header.size + padding(header.size)
        while left > 0 and (piece := file.read(min(left, PIECE))):
            left -= len(piece)
        if left > 0:
            return f"{shard.name} is cut off within {header.name}"
    if samples != shard.samples:
        return f"{shard.name} has {samples} samples, the index says {shard.samples}"
    return "" if at == shard.bytes - len(END) else f"{shard.name} ends at byte {at}, before its last sample"
