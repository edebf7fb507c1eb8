# SPDX-License-Identifier: Apache-2.0
"""Gets a file into the cache: finds it valid, waits for another process that downloads it, or downloads it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial

from paceline.checkpoint.urls import shown, source_of
from paceline.errors import CacheError
from paceline_plugins.data.cache.checksums import digest_of
from paceline_plugins.data.cache.directory import CacheDirectory
from paceline_plugins.data.cache.download import Downloader, Reserve
from paceline_plugins.data.cache.evict import EvictionRank
from paceline_plugins.data.cache.ledger import FULL, explained
from paceline_plugins.data.cache.locks import FileLock, StallTimeout
from paceline_plugins.data.cache.names import CacheEntry, key_of
from paceline_plugins.data.cache.stats import Counters

State = tuple[int, int, int]
"""Inode, time of change and size: of the file on disk that was checked."""


class FileGetter:
    """Gets files into a directory, for one process; other processes may stall for `timeout_s`."""

    def __init__(self, directory: CacheDirectory, downloader: Downloader, counters: Counters, timeout_s: float) -> None:
        self._directory, self._downloader, self._counters, self._timeout_s = directory, downloader, counters, timeout_s
        self._valid: dict[str, State] = {}  # by key: files that this process has fetched or checked
        self._damaged: dict[str, State] = {}
        self._digests: dict[str, tuple[State, str]] = {}  # SHA-256 of files whose entry has none
        self._arrived = threading.Condition()  # notified when this process has fetched a file
        self._likely_bytes: int | None = None  # of the next file: the size of the last one

    def pin(self, url: str, sha256: str | None, rank: EvictionRank) -> tuple[FileLock, bool]:
        """Get a file; return the shared lock that prevents its eviction, and whether the file was there already."""
        directory, lock, hit = self._directory, self._directory.lock(url), True
        stall = StallTimeout(
            self._timeout_s,
            lambda: os.stat(directory.part(url)).st_size,
            partial(self._stalled_download, url),
            self._arrived,
        )
        while True:
            with explained(directory.path):
                if directory.file(url).exists() and lock.try_acquire(shared=True):
                    if self.is_valid(url, sha256):
                        directory.touch(url)
                        return lock, hit
                    lock.release()
                alone = lock.try_acquire(shared=False)
            if alone:
                hit = self._get_alone(url, sha256, rank, lock) and hit
                if directory.lookup(url) is not None:
                    return lock, hit
                lock.release()  # evicted when the lock became shared
                continue
            hit = False
            stall.wait()

    def _get_alone(self, url: str, sha256: str | None, rank: EvictionRank, lock: FileLock) -> bool:
        """Under the exclusive lock: download the file unless it has arrived meanwhile; True if it has."""
        try:
            if self.is_valid(url, sha256):
                self._directory.share(lock)
                return True
            self._directory.drop(url, complete=not self._worth_keeping(url))
            stall = StallTimeout(self._timeout_s, self._directory.complete_bytes, partial(self._no_room, url))

            def reserve(size: int | None) -> bool:
                while not self._directory.reserve(url, size, rank, lock):
                    stall.wait()
                return True

            self._download(url, sha256, rank, lock, reserve)
            return False
        except BaseException:
            lock.release(remove=not self._directory.file(url).exists())
            raise

    def prefetch(self, url: str, rank: EvictionRank, turn: Callable[[], bool], reserved: Callable[[], None]) -> bool:
        """Fetch a file for later; False: there is no room now. True also where another process is fetching it."""
        directory, lock = self._directory, self._directory.lock(url)
        if directory.lookup(url) is not None:
            directory.touch(url)
            return True
        # A request that is abandoned for lack of room wastes bandwidth. So reserve first, for a file as large as the
        # last one, and correct that when the source gives the size.
        likely = self._likely_bytes
        if likely is not None and not turn():
            return False
        with explained(directory.path):
            if not lock.try_acquire(shared=False):
                return True

        holds: int | None = None

        def hold(size: int | None) -> bool:
            nonlocal holds
            if size is None or size != holds:
                if not directory.reserve(url, size, rank, lock):
                    return False
                holds = size
            return True

        def reserve(size: int | None) -> bool:
            if size is not None:
                self._likely_bytes = min(size, (directory.cap_bytes or size) // 2)
            if not turn() or not hold(size):
                return False
            reserved()
            return True

        try:
            if directory.lookup(url) is not None:
                return True
            directory.drop(url)
            if likely is not None:
                if not (turn() and hold(likely)):
                    return False
                reserved()
            return self._download(url, None, rank, lock, reserve)
        finally:
            lock.release(remove=not directory.file(url).exists())
            with self._arrived:
                self._arrived.notify_all()

    def _download(self, url: str, sha256: str | None, rank: EvictionRank, lock: FileLock, reserve: Reserve) -> bool:
        directory, committed = self._directory, False
        evict = partial(directory.evict, rank=rank)
        try:
            entry = self._downloader.fetch(url, directory.part(url), sha256, reserve, evict)
            if entry is None:
                return False
            self._commit(entry, lock, evict)
            committed = True
        finally:
            if not committed:
                with contextlib.suppress(CacheError):
                    directory.drop(url, complete=False)
        self._valid[key_of(url)] = self._state(url)
        return True

    def _commit(self, entry: CacheEntry, lock: FileLock, evict: Callable[[int], bool]) -> None:
        try:
            self._directory.commit(entry, lock)
        except OSError as error:
            if error.errno not in FULL or not evict(1 << 16):
                raise CacheError(
                    f"{self._directory.path}: what belongs to {shown(entry.url)} could not be written: {error}"
                ) from error
            self._directory.commit(entry, lock)

    def _worth_keeping(self, url: str) -> bool:
        """Whether a valid file of another version than the caller's may stay until that has been downloaded."""
        entry, cap = self._directory.lookup(url), self._directory.cap_bytes
        return entry is not None and self.is_valid(url, None) and (cap is None or 2 * entry.size <= cap)

    def is_valid(self, url: str, sha256: str | None) -> bool:
        """Whether a file exists and is undamaged; reads it if this process has neither fetched nor checked it.

        The caller holds its lock, shared or exclusive.
        """
        entry = self._directory.lookup(url)
        if entry is None:
            return False
        if sha256 is not None and self._sha256(url, entry) != sha256.lower():
            return False
        key, state = key_of(url), self._state(url)
        if self._valid.get(key) == state:
            return True
        if self._damaged.get(key) == state:
            return False
        if self._matches(url, entry):
            self._valid[key] = state
            return True
        self._damaged[key] = state
        with self._counters.of(source_of(url)) as stats:
            stats.corrupt += 1
        return False

    def _matches(self, url: str, entry: CacheEntry) -> bool:
        checksum = f"sha256:{entry.sha256}" if entry.sha256 is not None else entry.source or ""
        algorithm, _, digest = checksum.partition(":")
        return bool(algorithm) and digest_of(self._directory.file(url), algorithm) == digest

    def _sha256(self, url: str, entry: CacheEntry) -> str | None:
        if entry.sha256 is not None:
            return entry.sha256
        key, state = key_of(url), self._state(url)
        if key not in self._digests or self._digests[key][0] != state:
            self._digests[key] = (state, digest_of(self._directory.file(url), "sha256") or "")
        return self._digests[key][1]

    def _state(self, url: str) -> State:
        try:
            found = self._directory.file(url).stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _stalled_download(self, url: str, waited_s: float) -> Exception:
        return CacheError(
            f"{shown(url)}: another process or thread is fetching it and has made no progress for {waited_s:.0f} s "
            f"(lock {self._directory.lock(url).path}); stop that process, or raise timeout_s"
        )

    def _no_room(self, url: str, waited_s: float) -> Exception:
        return CacheError(
            f"{shown(url)}: no room in {self._directory.path} after {waited_s:.0f} s: all of its "
            f"{self._directory.cap_bytes} bytes are files in use or being fetched; raise cap_bytes, or keep fewer "
            "files open at a time"
        )
