# SPDX-License-Identifier: Apache-2.0
"""The directory on disk.

For each file, named by the first 32 hexadecimal digits of the SHA-256 of its url:

    f-<key>.tar    the file itself; complete, because it gets this name last
    <key>.meta     JSON: url, size, SHA-256 of the content (or null), checksum of the source (or null); its time of
                   change is the time of the last use
    <key>.lock     held alone while the file is fetched or removed, shared by those who use it
    <key>.part     what has been fetched so far

The cap counts the files themselves; beside each stand some 250 bytes of JSON. A place is promised before a download
begins, so that complete files and promises together never exceed the cap. Only a download of unknown length goes above
it, and there is only one of those at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from paceline.data.cache.evict import EvictionRank, Evictor, remove_file
from paceline.data.cache.ledger import SpaceLedger, SpaceUsage, told
from paceline.data.cache.locks import FileLock
from paceline.data.cache.names import CacheEntry, file_name, key_of, read_entry
from paceline.data.cache.regular_file import write_regular
from paceline.data.cache.urls import shown
from paceline.errors import CacheError


class CacheDirectory:
    """A cache directory.

    Args:
        directory: made where it is missing.
        cap_bytes: how much of it files may fill; None: as much as the disk has.
        timeout_s: how long to wait for another process that has the directory's lock.

    Raises:
        CacheError: the directory cannot be made.
    """

    def __init__(self, directory: Path, cap_bytes: int | None, timeout_s: float) -> None:
        self.directory, self.cap_bytes = directory, cap_bytes
        with told(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self.evictor = Evictor(directory)
        self._ledger = SpaceLedger(directory, self._count, timeout_s)

    def path(self, url: str) -> Path:
        """Where the file of a url is, or would be."""
        return self.directory / file_name(url)

    def part(self, url: str) -> Path:
        """Where the file is while it is fetched."""
        return self.directory / f"{key_of(url)}.part"

    def lock(self, url: str) -> FileLock:
        """A new lock on the entry of a url."""
        return FileLock(self.directory / f"{key_of(url)}.lock")

    def _meta(self, url: str) -> Path:
        return self.directory / f"{key_of(url)}.meta"

    def look(self, url: str) -> CacheEntry | None:
        """What is said of a file that is there, if its size is as said; does not read the file."""
        entry = read_entry(self._meta(url))
        try:
            whole = entry is not None and self.path(url).stat().st_size == entry.size
        except OSError:
            return None
        return entry if entry is not None and whole and entry.url == url else None

    def used(self, url: str) -> None:
        """Note that a file is used now."""
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self._meta(url), ns=(now, now), follow_symlinks=False)

    def reserve(self, url: str, size: int | None, rank: EvictionRank, lock: FileLock) -> bool:
        """Promise room for a download, removing what is least needed; False where what could go is not enough.

        Args:
            url: whose `lock` the caller holds alone.
            size: in bytes; None: not known.
            rank: see :class:`Evictor`.
            lock: that lock; the promise is written into it as well.

        Raises:
            CacheError: the file is larger than the cap.
        """
        self.check_size(url, size)
        key = key_of(url)
        with self._ledger.open() as accounts:
            accounts.claims.pop(key, None)
            if not self._make_room(accounts, size, rank):
                return False
            accounts.claims[key] = size
            note_claim(lock, size)
        return True

    def _make_room(self, accounts: SpaceUsage, size: int | None, rank: EvictionRank) -> bool:
        if self.cap_bytes is None:
            return True
        if size is None:
            if None in accounts.claims.values():
                self.evictor.drop_dead(accounts)
            return None not in accounts.claims.values()
        if accounts.total + size > self.cap_bytes:
            self.evictor.drop_dead(accounts)
        if accounts.total + size > self.cap_bytes:
            self.evictor.evict(accounts, accounts.total + size - self.cap_bytes, rank)
        return accounts.total + size <= self.cap_bytes

    def check_size(self, url: str, size: int | None) -> None:
        """Raise CacheError if a file of this size can never be kept."""
        if size is not None and self.cap_bytes is not None and size > self.cap_bytes:
            raise CacheError(
                f"{shown(url)} has {size} bytes, more than the whole cache may hold (cap_bytes={self.cap_bytes}, in "
                f"{self.directory}); raise cap_bytes, or cut the file into smaller ones"
            )

    def commit(self, entry: CacheEntry, lock: FileLock) -> None:
        """Give a fetched file its name; from now on the lock is shared with other users."""
        with self._ledger.open() as accounts:
            remove_file(self.path(entry.url), accounts)  # an older version
            write_regular(self._meta(entry.url), json.dumps(asdict(entry)).encode())
            os.replace(self.part(entry.url), self.path(entry.url))
            accounts.claims.pop(key_of(entry.url), None)
            accounts.complete += entry.size
            os.ftruncate(lock.descriptor, 0)
            lock.share()

    def share(self, lock: FileLock) -> None:
        """Turn a lock held alone into one that others may share."""
        with self._ledger.open():
            lock.share()

    def drop(self, url: str, *, complete: bool = True) -> None:
        """Remove what there is of a file, or only what is not `complete`; the caller holds its lock alone."""
        if not any(path.exists() for path in (self.part(url), self.path(url), self._meta(url))):
            return
        with self._ledger.open() as accounts:
            accounts.claims.pop(key_of(url), None)
            self.part(url).unlink(missing_ok=True)
            if complete:
                remove_file(self.path(url), accounts)
                self._meta(url).unlink(missing_ok=True)

    def free(self, size: int, rank: EvictionRank) -> bool:
        """Remove files of at least `size` bytes together if that many can go, or what can; False: none could."""
        with self._ledger.open() as accounts:
            before = accounts.total
            self.evictor.drop_dead(accounts)
            self.evictor.evict(accounts, size, rank)
            return accounts.total < before

    def complete_bytes(self) -> int:
        """Bytes of the complete files."""
        with self._ledger.open() as accounts:
            return accounts.complete

    def _count(self) -> SpaceUsage:
        """Count what is there, as after a crash; a part without its file belongs to a download."""
        accounts = SpaceUsage()
        with os.scandir(self.directory) as found:
            for item in found:
                with contextlib.suppress(FileNotFoundError):
                    if item.name.startswith("f-"):
                        accounts.complete += item.stat().st_size
                    elif item.name.endswith(".part"):
                        key = item.name.removesuffix(".part")
                        accounts.claims[key] = read_claim(self.directory / f"{key}.lock", item.stat().st_size)
        return accounts


def note_claim(lock: FileLock, size: int | None) -> None:
    """Write into a held lock how many bytes are promised to its holder, for whoever has to count."""
    with contextlib.suppress(OSError):  # on a full disk the size of the part has to do
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, b"?" if size is None else str(size).encode(), 0)


def read_claim(path: Path, otherwise: int) -> int | None:
    """What `note_claim` wrote; `otherwise` where that is not to be had."""
    try:
        text = path.read_text(encoding="ascii")
        return None if text == "?" else int(text)
    except (OSError, ValueError):
        return otherwise
