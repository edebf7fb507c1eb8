# SPDX-License-Identifier: Apache-2.0
"""Which files go when room is needed: the least recently used, never one that is in use."""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Callable
from pathlib import Path

from paceline.data.cache.ledger import SpaceUsage
from paceline.data.cache.locks import FileLock
from paceline.data.cache.names import file_name, read_entry

EvictionRank = Callable[[str], "int | None"]
"""Of a key: None: not to be removed now; 0: removed by age; larger: only when no more of 0 is left, ascending."""


class Evictor:
    """Removes files; all methods are called with the ledger's lock held.

    The list of files by time of last use is made by one look at the directory and used up by and by. What was used
    since then has a newer time, and is put back with it; what came since then is newer than all of the list.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.on_wished: Callable[[str], None] = lambda key: None  # told of every removal of a rank above 0
        self._oldest: list[tuple[int, str]] = []

    def drop_dead(self, accounts: SpaceUsage) -> None:
        """Remove what downloads have left whose process has died: nobody holds their lock any more."""
        for key in list(accounts.claims):
            lock = FileLock(self._directory / f"{key}.lock")
            if lock.try_acquire(shared=False):
                (self._directory / f"{key}.part").unlink(missing_ok=True)
                accounts.claims.pop(key)
                lock.release(remove=not (self._directory / f"{key}.meta").exists())

    def evict(self, accounts: SpaceUsage, need: int, rank: EvictionRank) -> None:
        """Remove files until `need` bytes are gained, or nothing more can go."""
        goal = accounts.total - need
        later = self._by_age(accounts, goal, rank)
        for _, _, key in sorted(later):
            if accounts.total <= goal:
                return
            if self._remove(key, accounts):
                self.on_wished(key)

    def _by_age(self, accounts: SpaceUsage, goal: int, rank: EvictionRank) -> list[tuple[int, int, str]]:
        """Remove files of rank 0; give (rank, time, key) of the others that were met."""
        kept: list[tuple[int, str]] = []
        later: list[tuple[int, int, str]] = []
        fresh = False
        while accounts.total > goal:
            if not self._oldest:
                if fresh:
                    break
                fresh, kept, later = True, [], []
                self._oldest = self._scan()
                continue
            used, key = heapq.heappop(self._oldest)
            now = self._used(key)
            if now is None:
                continue
            if now != used:
                heapq.heappush(self._oldest, (now, key))
                continue
            place = rank(key)
            if place == 0 and self._remove(key, accounts):
                continue
            kept.append((used, key))
            if place:
                later.append((place, used, key))
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

    def _used(self, key: str) -> int | None:
        try:
            return (self._directory / f"{key}.meta").stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _remove(self, key: str, accounts: SpaceUsage) -> bool:
        """Remove a file unless somebody uses it."""
        lock = FileLock(self._directory / f"{key}.lock")
        if not lock.try_acquire(shared=False):
            return False
        try:
            meta = self._directory / f"{key}.meta"
            entry = read_entry(meta)
            if entry is not None:
                remove_file(self._directory / file_name(entry.url), accounts)
            meta.unlink(missing_ok=True)
        finally:
            lock.release(remove=True)
        return True


def remove_file(path: Path, accounts: SpaceUsage) -> None:
    """Remove a complete file, if it is there, and take it off the accounts."""
    with contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        path.unlink()
        accounts.complete -= size
