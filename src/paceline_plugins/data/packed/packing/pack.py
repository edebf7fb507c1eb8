# SPDX-License-Identifier: Apache-2.0
"""Packs a source into a packed data set, all of it or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CacheError, DataError
from paceline_plugins.data.cache.locks import FileLock
from paceline_plugins.data.packed.index import Index
from paceline_plugins.data.packed.packing import Members, SampleSource, Task
from paceline_plugins.data.packed.packing.base import Ready
from paceline_plugins.data.packed.packing.folder import FolderSource
from paceline_plugins.data.packed.tar import BLOCK
from paceline_plugins.data.packed.writer import ShardWriter

# The directory in which a data set is packed, and its lock.
#
# A pack holds a lock on `OUT.partial.lock`, which names its host. The kernel releases the lock of a killed process; the
# next pack then removes its files.

OURS = re.compile(r"shard-\d{5,}\.(tar|idx)|index\.json")
LONGEST_NOTE = 4096


@contextlib.contextmanager
def partial_directory(out: Path) -> Iterator[Path]:
    """An empty directory beside `out`, which is removed unless it was renamed; DataError if it may not be used."""
    partial = out.with_name(out.name + ".partial")
    lock = FileLock(out.with_name(out.name + ".partial.lock"))
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        if not lock.try_acquire(shared=False):
            raise DataError(f"another pack is at work in {partial} (its lock is {lock.path}): wait for its end")
    except CacheError as error:
        raise DataError(str(error)) from None
    except OSError as error:
        raise DataError(f"cannot make {partial}: {error.strerror or error}; choose another place") from error
    try:
        _prepare(partial, lock)
    except BaseException:
        lock.release(remove=not os.path.lexists(partial))  # if it stays, it names the host of the leftovers
        raise
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release(remove=True)


def _prepare(partial: Path, lock: FileLock) -> None:
    try:
        host = _host(lock.descriptor)
        if os.path.lexists(partial):
            _remove(partial, host)
        note = json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode()
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, note, 0)
        partial.mkdir()
    except OSError as error:
        raise DataError(f"cannot make {partial}: {error.strerror or error}; choose another place") from error


def _host(descriptor: int) -> str:
    """The host of the previous pack; "" if unknown."""
    try:
        return str(json.loads(os.pread(descriptor, LONGEST_NOTE, 0))["host"])
    except (ValueError, KeyError, TypeError):
        return ""


def _remove(partial: Path, host: str) -> None:
    """Remove the files of a killed pack, but no other file."""
    if host != socket.gethostname():
        where = f"on {host}" if host else "by an earlier paceline, or not by a pack"
        raise DataError(
            f"{partial} exists and was made {where}, which may still be packing: remove it when no pack runs there"
        )
    unknown = "a link or a file" if partial.is_symlink() or not partial.is_dir() else _unknown_file(partial)
    if unknown:
        raise DataError(f"{partial} exists and is not what a killed pack leaves ({unknown}): move it away")
    shutil.rmtree(partial)


def _unknown_file(partial: Path) -> str:
    return next((one.name for one in partial.iterdir() if not OURS.fullmatch(one.name) or one.is_symlink()), "")


SHARD_BYTES = 64 << 20
AHEAD = 2  # samples in memory for each thread
MOST_JOBS = 256
MOST_KINDS = 20
OTHER = "other"


@dataclass(frozen=True)
class PackProgress:
    """The samples, bytes and shards packed so far."""

    samples: int
    bytes: int
    shards: int
    fraction: float | None  # of the source; None where that is unknown


@dataclass(frozen=True)
class Result:
    """A packed data set."""

    index: Index
    kinds: dict[str, int]  # extensions of a sample, joined by " + " -> number of such samples
    notes: tuple[str, ...]  # what was skipped


def pack(
    source: SampleSource,
    out: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    seed: int | None = None,
    jobs: int = 1,
    on_sample: Callable[[PackProgress], None] = lambda done: None,
) -> Result:
    """Write a packed data set.

    It is written in `OUT.partial`, which is renamed when it is complete and removed when packing fails. If a pack of
    this host was killed, the next one removes its files. Memory holds `2 jobs` samples and one shard's offsets.

    Args:
        source: of the samples.
        out: directory that must not exist.
        shard_bytes: most bytes of a shard; one sample may be larger.
        seed: of a shuffled order; None keeps the source's.
        jobs: samples read at once.
        on_sample: called after every sample.

    Raises:
        DataError: the source is damaged or empty, or `out` cannot be made.
    """
    if shard_bytes < 4 * BLOCK:
        raise DataError(f"shard_bytes must be at least {4 * BLOCK} bytes, got {shard_bytes}")
    if not 1 <= jobs <= MOST_JOBS:
        raise DataError(f"jobs must lie in 1..{MOST_JOBS}, got {jobs}")
    if os.path.lexists(out):
        raise DataError(f"{out} exists already; remove it, or choose another place")
    if isinstance(source, FolderSource) and out.resolve().is_relative_to(source.root.resolve()):
        raise DataError(f"{out} lies within {source.root}, which would be packed into itself; choose another place")
    with partial_directory(out) as partial:
        try:
            result = _write(source, partial, shard_bytes, seed, jobs, on_sample)
            os.rename(partial, out)
        except OSError as error:
            raise DataError(f"packing failed at {error.filename or partial}: {error.strerror or error}") from error
    return result


def _write(
    source: SampleSource,
    directory: Path,
    shard_bytes: int,
    seed: int | None,
    jobs: int,
    on_sample: Callable[[PackProgress], None],
) -> Result:
    writer = ShardWriter(directory, shard_bytes)
    kinds: Counter[str] = Counter()
    try:
        for members in _read(source.tasks(seed), jobs):
            writer.add(members)
            kind = " + ".join(sorted(members))
            kinds[kind if kind in kinds or len(kinds) < MOST_KINDS else OTHER] += 1
            on_sample(PackProgress(writer.samples, writer.bytes, writer.shards, source.progress.fraction))
        if writer.samples == 0:
            raise DataError("the source has no samples; check that it is the right path")
        index = writer.finish()
    finally:
        writer.abandon()
    return Result(index, dict(kinds), tuple(source.progress.notes))


def _read(tasks: Iterator[Task], jobs: int) -> Iterator[Members]:
    """The samples of the tasks, in their order, `jobs` of them at once."""
    if jobs == 1:
        for task in tasks:
            yield task()
        return
    waiting: deque[Future[Members]] = deque()
    with ThreadPoolExecutor(jobs, "pack") as pool:
        try:
            for task in tasks:
                if isinstance(task, Ready) and not waiting:
                    yield task()
                    continue
                waiting.append(pool.submit(task))
                if len(waiting) >= AHEAD * jobs:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
