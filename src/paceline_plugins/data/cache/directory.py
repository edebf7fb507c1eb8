# SPDX-License-Identifier: Apache-2.0
"""The directory on disk.

For each file, named by the first 32 hexadecimal digits of the SHA-256 of its URL:

    f-<key>.tar    the file itself; complete, because it gets this name last
    <key>.meta     JSON: url, size, SHA-256 of the content (or null), checksum of the source (or null); its time of
                   change is the time of the last use
    <key>.lock     locked exclusively while the file is downloaded or removed, shared while it is in use
    <key>.part     the bytes downloaded so far

The cap counts the files themselves; each has some 250 bytes of JSON beside it. Room is reserved before a download
starts, so that complete files and reservations together never exceed the cap. Only a download of unknown size exceeds
it, one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from paceline.checkpoint.urls import shown
from paceline.errors import CacheError
from paceline_plugins.data.cache.evict import EvictionRank, Evictor, remove_file
from paceline_plugins.data.cache.ledger import SpaceLedger, SpaceUsage, explained
from paceline_plugins.data.cache.locks import FileLock
from paceline_plugins.data.cache.names import CacheEntry, file_name, key_of, read_entry
from paceline_plugins.data.cache.regular_file import write_regular


class CacheDirectory:
    """A cache directory, created where it is missing; CacheError if that fails."""

    def __init__(self, path: Path, cap_bytes: int | None, timeout_s: float) -> None:
        self.path, self.cap_bytes = path, cap_bytes
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
        self.evictor = Evictor(path)
        self._ledger = SpaceLedger(path, self._count, timeout_s)

    def file(self, url: str) -> Path:
        """The path of a URL's complete file."""
        return self.path / file_name(url)

    def part(self, url: str) -> Path:
        """The path of the file while it is downloaded."""
        return self.path / f"{key_of(url)}.part"

    def lock(self, url: str) -> FileLock:
        """A new lock on the entry of a URL."""
        return FileLock(self.path / f"{key_of(url)}.lock")

    def _meta(self, url: str) -> Path:
        return self.path / f"{key_of(url)}.meta"

    def lookup(self, url: str) -> CacheEntry | None:
        """The entry of a file whose size on disk is right; does not read the file."""
        entry = read_entry(self._meta(url))
        with contextlib.suppress(OSError):
            if entry is not None and entry.url == url and self.file(url).stat().st_size == entry.size:
                return entry
        return None

    def touch(self, url: str) -> None:
        """Record that a file is used now."""
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self._meta(url), ns=(now, now), follow_symlinks=False)

    def reserve(self, url: str, size: int | None, rank: EvictionRank, lock: FileLock) -> bool:
        """Reserve room for a download, evicting by `rank`; False where too little is evictable.

        Args:
            url: the file.
            size: in bytes; None: unknown.
            rank: see :mod:`paceline_plugins.data.cache.evict`.
            lock: the file's exclusive lock; the reservation is written into it as well.

        Raises:
            CacheError: the file is larger than the cap.
        """
        if size is not None and self.cap_bytes is not None and size > self.cap_bytes:
            raise CacheError(
                f"{shown(url)} has {size} bytes, more than the whole cache may hold (cap_bytes={self.cap_bytes}, in "
                f"{self.path}); raise cap_bytes, or cut the file into smaller ones"
            )
        key = key_of(url)
        with self._ledger.open() as usage:
            usage.claims.pop(key, None)
            if not self._make_room(usage, size, rank):
                return False
            usage.claims[key] = size
            write_claim(lock, size)
        return True

    def _make_room(self, usage: SpaceUsage, size: int | None, rank: EvictionRank) -> bool:
        if self.cap_bytes is None:
            return True
        if size is None:
            if None in usage.claims.values():
                self.evictor.drop_dead(usage)
            return None not in usage.claims.values()
        if usage.total + size > self.cap_bytes:
            self.evictor.drop_dead(usage)
        if usage.total + size > self.cap_bytes:
            self.evictor.evict(usage, usage.total + size - self.cap_bytes, rank)
        return usage.total + size <= self.cap_bytes

    def commit(self, entry: CacheEntry, lock: FileLock) -> None:
        """Give a downloaded file its name; from now on the lock is shared."""
        with self._ledger.open() as usage:
            remove_file(self.file(entry.url), usage)  # an older version
            write_regular(self._meta(entry.url), json.dumps(asdict(entry)).encode())
            os.replace(self.part(entry.url), self.file(entry.url))
            usage.claims.pop(key_of(entry.url), None)
            usage.complete += entry.size
            os.ftruncate(lock.descriptor, 0)
            lock.share()

    def share(self, lock: FileLock) -> None:
        """Turn an exclusive lock into a shared one; no eviction comes between."""
        with self._ledger.open():
            lock.share()

    def drop(self, url: str, *, complete: bool = True) -> None:
        """Remove a file's download and, with `complete`, the file; the caller holds its lock exclusively."""
        if not any(path.exists() for path in (self.part(url), self.file(url), self._meta(url))):
            return
        with self._ledger.open() as usage:
            usage.claims.pop(key_of(url), None)
            self.part(url).unlink(missing_ok=True)
            if complete:
                remove_file(self.file(url), usage)
                self._meta(url).unlink(missing_ok=True)

    def evict(self, size: int, rank: EvictionRank) -> bool:
        """Evict `size` bytes, or as many as are evictable; False: none."""
        with self._ledger.open() as usage:
            before = usage.total
            self.evictor.drop_dead(usage)
            self.evictor.evict(usage, size, rank)
            return usage.total < before

    def complete_bytes(self) -> int:
        """Bytes of the complete files."""
        with self._ledger.open() as usage:
            return usage.complete

    def _count(self) -> SpaceUsage:
        """Count the files, as after a crash; a part without a complete file is a download."""
        usage = SpaceUsage()
        with os.scandir(self.path) as found:
            for item in found:
                with contextlib.suppress(FileNotFoundError):
                    if item.name.startswith("f-"):
                        usage.complete += item.stat().st_size
                    elif item.name.endswith(".part"):
                        key = item.name.removesuffix(".part")
                        usage.claims[key] = read_claim(self.path / f"{key}.lock", item.stat().st_size)
        return usage


def write_claim(lock: FileLock, size: int | None) -> None:
    """Write the reserved bytes into a held lock, for a process that has to count."""
    with contextlib.suppress(OSError):  # on a full disk the size of the part has to do
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, b"?" if size is None else str(size).encode(), 0)


def read_claim(path: Path, otherwise: int) -> int | None:
    """The bytes that `write_claim` wrote; `otherwise` where they cannot be read."""
    try:
        text = path.read_text(encoding="ascii")
        return None if text == "?" else int(text)
    except (OSError, ValueError):
        return otherwise
