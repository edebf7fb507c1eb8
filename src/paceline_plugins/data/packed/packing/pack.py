# SPDX-License-Identifier: Apache-2.0
"""Packs a source into a packed data set, all of it or nothing."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import DataError
from paceline_plugins.data.packed.index import Index
from paceline_plugins.data.packed.packing import Members, SampleSource, Task
from paceline_plugins.data.packed.packing.base import Ready
from paceline_plugins.data.packed.packing.folder import FolderSource
from paceline_plugins.data.packed.packing.partial import partial_directory
from paceline_plugins.data.packed.tar import BLOCK
from paceline_plugins.data.packed.writer import ShardWriter

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
