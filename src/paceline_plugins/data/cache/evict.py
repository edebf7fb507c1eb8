# SPDX-License-Identifier: Apache-2.0
"""Evicts files when room is needed: the least recently used first, never one in use."""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Callable
from pathlib import Path

from paceline_plugins.data.cache.ledger import SpaceUsage
from paceline_plugins.data.cache.locks import FileLock
from paceline_plugins.data.cache.names import file_name, read_entry

EvictionRank = Callable[[str], "int | None"]
"""Of a key: None: not evictable now; 0: evictable by age; larger: only after all of rank 0, in ascending order."""


class Evictor:
    """Evicts files; callers hold the ledger's lock.

    A heap of files by time of last use comes from one scan of the directory and serves many evictions. A file that
    was used since has a newer time, and goes back into the heap with it; files that came since are newer than the heap.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.on_prefetched: Callable[[str], None] = lambda key: None  # called after an eviction of a rank above 0
        self._oldest: list[tuple[int, str]] = []

    def drop_dead(self, usage: SpaceUsage) -> None:
        """Remove the downloads of dead processes, whose locks are free."""
        for key in list(usage.claims):
            lock = FileLock(self._directory / f"{key}.lock")
            if lock.try_acquire(shared=False):
                (self._directory / f"{key}.part").unlink(missing_ok=True)
                usage.claims.pop(key)
                lock.release(remove=not (self._directory / f"{key}.meta").exists())

    def evict(self, usage: SpaceUsage, need: int, rank: EvictionRank) -> None:
        """Evict files until `need` bytes are free, or no evictable file is left."""
        goal = usage.total - need
        for _, _, key in sorted(self._evict_by_age(usage, goal, rank)):
            if usage.total <= goal:
                return
            if self._remove(key, usage):
                self.on_prefetched(key)

    def _evict_by_age(self, usage: SpaceUsage, goal: int, rank: EvictionRank) -> list[tuple[int, int, str]]:
        """Evict files of rank 0; return (rank, time, key) of the files met with a larger rank."""
        kept: list[tuple[int, str]] = []
        later: list[tuple[int, int, str]] = []
        scanned = False
        while usage.total > goal:
            if not self._oldest:
                if scanned:
                    break
                scanned, kept, later = True, [], []
                self._oldest = self._scan()
                continue
            used, key = heapq.heappop(self._oldest)
            now = self._last_use(key)
            if now is None:
                continue
            if now != used:
                heapq.heappush(self._oldest, (now, key))
                continue
            found = rank(key)
            if found == 0 and self._remove(key, usage):
                continue
            kept.append((used, key))
            if found:
                later.append((found, used, key))
        for item in kept:
            heapq.heappush(self._oldest, item)
        return later

    def _scan(self) -> list[tuple[int, str]]:
        found = []
        with os.scandir(self._directory) as items:
            for item in items:
                if item.name.endswith(".meta"):
                    with contextlib.suppress(FileNotFoundError):
                        found.append((item.stat().st_mtime_ns, item.name.removesuffix(".meta")))
        heapq.heapify(found)
        return found

    def _last_use(self, key: str) -> int | None:
        try:
            return (self._directory / f"{key}.meta").stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _remove(self, key: str, usage: SpaceUsage) -> bool:
        """Remove a file unless it is in use."""
        lock = FileLock(self._directory / f"{key}.lock")
        if not lock.try_acquire(shared=False):
            return False
        try:
            meta = self._directory / f"{key}.meta"
            entry = read_entry(meta)
            if entry is not None:
                remove_file(self._directory / file_name(entry.url), usage)
            meta.unlink(missing_ok=True)
        finally:
            lock.release(remove=True)
        return True


def remove_file(path: Path, usage: SpaceUsage) -> None:
    """Remove a complete file, if it exists, and subtract its bytes."""
    with contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        path.unlink()
        usage.complete -= size
