# SPDX-License-Identifier: Apache-2.0
"""Measures what a storage holds, and how fast this machine reads it with one reader and with several."""

from __future__ import annotations

import os
import random
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from paceline.errors import DataError
from paceline_plugins.data.packed.index import INDEX
from paceline_plugins.data.packed.storage import Storage, file_system, is_url, local_path
from paceline_plugins.data.packed.verify import read_index

MOST_FILES = 100_000  # listed where there is no index
PROBES = 7  # of the first byte
STALL_S = 60.0  # after the measurement's time a storage that does not answer is an error
SMALLEST_PIECE, LARGEST_PIECE = 1 << 20, 16 << 20
QUICK_S = 0.1  # pieces grow while each takes less
_STREAM = re.compile(r".*\.(tar|tgz|txz|tbz2|tzst|jsonl|ndjson|parquet|pq|ark)(\.gz|\.bz2|\.xz|\.zst)?", re.IGNORECASE)


@dataclass(frozen=True)
class Holding:
    """What a storage holds."""

    kind: str  # "packed" or "files"
    files: tuple[tuple[str, int], ...]  # (name, bytes) of those that were listed
    bytes: int | None  # of all files; None where more exist than were listed
    bytes_per_sample: float  # mean
    notes: tuple[str, ...] = ()  # the limits of these numbers

    @property
    def file_bytes(self) -> float:
        """Mean size of a file."""
        return sum(size for _, size in self.files) / len(self.files)


@dataclass(frozen=True)
class Speed:
    """A measurement of reading."""

    readers: int  # concurrent threads
    bytes: int  # read by all of them
    seconds: float  # until the last reader finished its piece
    files: int  # opened; some more than once where there are few

    @property
    def bytes_s(self) -> float:
        """Bytes a second of all readers together."""
        return self.bytes / self.seconds


def inspect(storage: Storage) -> Holding:
    """What a storage holds, by its index, or else by its files; DataError if that leaves a sample's size unknown."""
    try:
        storage.size(INDEX)
    except DataError:
        return _files(storage)
    index = read_index(storage)
    files = tuple((shard.name, shard.bytes) for shard in index.shards)
    return Holding("packed", files, index.total_bytes, index.total_bytes / index.samples)


def _files(storage: Storage) -> Holding:
    listed = _remote(storage.root) if storage.remote else _local(storage.root)
    files = tuple(islice(listed, MOST_FILES + 1))
    complete = len(files) <= MOST_FILES
    files = tuple((name, size) for name, size in files[:MOST_FILES] if size > 0)
    if not files:
        raise DataError(f"{storage.root} has no files with data; check the path")
    total = sum(size for _, size in files)
    notes = [] if complete else [f"only the first {MOST_FILES:,} files were looked at"]
    if all(_STREAM.fullmatch(name) for name, _ in files):
        raise DataError(f"{storage.root}: these files do not show how large a sample is; pack them first")
    bytes_per_sample = total / len({os.path.splitext(name)[0] for name, _ in files})
    notes.append("files whose names differ only after the last dot were taken as one sample")
    return Holding("files", files, total if complete else None, bytes_per_sample, tuple(notes))


def _local(root: str) -> Iterator[tuple[str, int]]:
    path = local_path(root)
    if path.is_file():
        raise DataError(f"{root} is a file; give the folder that holds the data")
    if not path.exists():
        raise DataError(f"{root} does not exist; check the path")
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            full = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(full):
                yield os.path.relpath(full, path), os.path.getsize(full)


def _remote(root: str) -> Iterator[tuple[str, int]]:
    system, inside = file_system(root)
    try:
        for _, _, found in system.walk(inside, detail=True):
            for about in found.values():
                if about.get("type") == "file":
                    yield about["name"].removeprefix(inside).lstrip("/"), int(about.get("size") or 0)
    except Exception as error:
        raise DataError(f"cannot list {root}: {type(error).__name__}: {error}") from error


def first_byte_s(storage: Storage, holding: Holding) -> float:
    """Seconds from the request for a file to its first KiB: the median over a few files."""
    found: list[float] = []

    def probe() -> None:
        for name, size in _chosen(holding, PROBES):
            began = time.perf_counter()
            next(_pieces(storage, name, min(size, 1024)))
            found.append(time.perf_counter() - began)

    _together([probe], 0.0, storage.root)
    return statistics.median(found)


def read_speed(storage: Storage, holding: Holding, readers: int, seconds: float) -> Speed:
    """Read whole files in random order for some seconds; DataError if a file cannot be read or the storage stalls."""
    counts, ends, opened = [0] * readers, [0.0] * readers, [0] * readers
    began = time.perf_counter()

    def read(number: int) -> None:
        while True:
            for name, size in _chosen(holding, len(holding.files)):
                opened[number] += 1
                for piece in _pieces(storage, name, size):
                    counts[number] += piece
                    ends[number] = time.perf_counter()
                    if ends[number] - began >= seconds:
                        return

    _together([lambda n=number: read(n) for number in range(readers)], seconds, storage.root)  # type: ignore[misc]
    return Speed(readers, sum(counts), max(max(ends) - began, 1e-9), sum(opened))


def _chosen(holding: Holding, count: int) -> list[tuple[str, int]]:
    return random.sample(holding.files, min(count, len(holding.files)))


def _pieces(storage: Storage, name: str, size: int) -> Iterator[int]:
    """Read a file and yield the bytes of each piece; a local file is dropped from the page cache first."""
    if not is_url(storage.root):
        with storage.open(name) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while size > 0 and (count := len(file.read(min(size, SMALLEST_PIECE)))):
                size -= count
                yield count
        return
    at, piece = 0, SMALLEST_PIECE
    while at < size:
        began = time.perf_counter()
        count = len(storage.read_part(name, at, min(size, at + piece)))
        if count == 0:
            return
        yield count
        at += count
        if time.perf_counter() - began < QUICK_S:
            piece = min(LARGEST_PIECE, 2 * piece)


def _together(tasks: list[Callable[[], None]], seconds: float, root: str) -> None:
    """Run functions in daemon threads, so that a storage that hangs does not keep this program from exiting."""
    faults: list[Exception] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    until = time.monotonic() + seconds + STALL_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if faults:
        raise faults[0]
    if hung := sum(thread.is_alive() for thread in threads):
        raise DataError(f"{root}: {hung} of {len(tasks)} readers had no answer within {seconds + STALL_S:.0f} s")
