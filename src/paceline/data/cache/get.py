# SPDX-License-Identifier: Apache-2.0
"""How a file comes to be there: found and sound, waited for while another fetches it, or fetched."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from paceline.data.cache.checksums import Checksum, digest_of
from paceline.data.cache.directory import CacheDirectory
from paceline.data.cache.download import Downloader
from paceline.data.cache.evict import EvictionRank
from paceline.data.cache.ledger import FULL, told
from paceline.data.cache.locks import LONGEST_S, SHORTEST_S, FileLock
from paceline.data.cache.names import CacheEntry, key_of
from paceline.data.cache.stall_timeout import StallTimeout
from paceline.data.cache.stats import Counters
from paceline.data.cache.urls import shown, source_of
from paceline.errors import CacheError

State = tuple[int, int, int]
"""Inode, time of change and size: of the file on disk that was looked at."""


class FileGetter:
    """Brings files into a store, for one process.

    Args:
        store: where they go.
        downloader: how they come.
        tallies: where damage is counted.
        timeout_s: how long to wait for others that make no progress.
    """

    def __init__(self, store: CacheDirectory, downloader: Downloader, tallies: Counters, timeout_s: float) -> None:
        self._store, self._downloader, self._tallies, self._timeout_s = store, downloader, tallies, timeout_s
        self._sound: dict[str, State] = {}  # by key: what this process has fetched or checked
        self._digests: dict[str, tuple[State, str]] = {}  # SHA-256 of files whose JSON has none
        self._damaged: dict[str, State] = {}
        self._likely_bytes: int | None = None  # of the next file: the size of the last one

    def pin(self, url: str, sha256: str | None, rank: EvictionRank) -> tuple[FileLock, bool]:
        """Have a file there and keep it there.

        Returns:
            the lock that keeps it, to be released by the caller, and whether the file was there already.
        """
        store, lock, hit, pause = self._store, self._store.lock(url), True, SHORTEST_S
        patient = StallTimeout(self._timeout_s, lambda: os.stat(store.part(url)).st_size, self._stuck(url))
        while True:
            with told(store.directory):
                if store.path(url).exists() and lock.try_acquire(shared=True):
                    if self.is_there(url, sha256):
                        store.used(url)
                        return lock, hit
                    lock.release()
                alone = lock.try_acquire(shared=False)
            if alone:
                hit = self._settle(url, sha256, rank, lock) and hit
                if store.look(url) is not None:
                    return lock, hit
                lock.release()  # between two kinds of lock somebody else was quicker
                continue
            hit = False
            patient()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)

    def _settle(self, url: str, sha256: str | None, rank: EvictionRank, lock: FileLock) -> bool:
        """With the lock held alone: fetch the file unless it has come meanwhile; True if it has."""
        try:
            if self.is_there(url, sha256):
                self._store.share(lock)
                return True
            self._store.drop(url, complete=not self._worth_keeping(url))
            wait = StallTimeout(self._timeout_s, self._store.complete_bytes, self._no_room(url))
            self._fetch(url, sha256, rank, lock, lambda size: self._wait_for_room(url, size, rank, lock, wait))
            return False
        except BaseException:
            lock.release(remove=not self._store.path(url).exists())
            raise

    def ahead(self, url: str, rank: EvictionRank, turn: Callable[[], bool], took_room: Callable[[], None]) -> bool:
        """Fetch a file for later; False: there is no room now. Somebody else who is fetching it is left to it."""
        store, lock = self._store, self._store.lock(url)
        if store.look(url) is not None:
            store.used(url)
            return True
        # A request that is broken off for want of room has cost some of the line; so room comes first, for a file as
        # large as the last one, and what the source says of the size corrects that.
        likely = self._likely_bytes
        if likely is not None and not turn():
            return False
        with told(store.directory):
            if not lock.try_acquire(shared=False):
                return True

        def admit(size: int | None) -> bool:
            if size is not None:
                self._likely_bytes = min(size, (store.cap_bytes or size) // 2)
            if not turn() or not store.reserve(url, size, rank, lock):
                return False
            took_room()
            return True

        try:
            if store.look(url) is not None:
                return True
            store.drop(url)
            if likely is not None and not (turn() and store.reserve(url, likely, rank, lock)):
                return False
            return self._fetch(url, None, rank, lock, admit)
        finally:
            lock.release(remove=not store.path(url).exists())

    def _fetch(
        self, url: str, sha256: str | None, rank: EvictionRank, lock: FileLock, admit: Callable[[int | None], bool]
    ) -> bool:
        store = self._store

        def free(size: int) -> bool:
            return store.free(size, rank)

        committed = False
        try:
            entry = self._downloader.fetch(url, store.part(url), sha256, admit, free)
            if entry is None:
                return False
            self._commit(entry, lock, free)
            committed = True
        finally:
            if not committed:
                with contextlib.suppress(CacheError):
                    store.drop(url, complete=False)
        self._sound[key_of(url)] = self._state(url)
        return True

    def _commit(self, entry: CacheEntry, lock: FileLock, free: Callable[[int], bool]) -> None:
        try:
            self._store.commit(entry, lock)
        except OSError as error:
            if error.errno not in FULL or not free(1 << 16):
                raise CacheError(
                    f"{self._store.directory}: what belongs to {shown(entry.url)} could not be written: {error}"
                ) from error
            self._store.commit(entry, lock)

    def _worth_keeping(self, url: str) -> bool:
        """Whether a sound file that is not what this caller wants may stay until the wanted one has come."""
        entry, cap = self._store.look(url), self._store.cap_bytes
        return entry is not None and self.is_there(url, None) and (cap is None or 2 * entry.size <= cap)

    def _wait_for_room(
        self, url: str, size: int | None, rank: EvictionRank, lock: FileLock, patient: StallTimeout
    ) -> bool:
        pause = SHORTEST_S
        while not self._store.reserve(url, size, rank, lock):
            patient()
            time.sleep(pause)
            pause = min(2 * pause, 2 * LONGEST_S)
        return True

    def is_there(self, url: str, sha256: str | None) -> bool:
        """Whether a file is there and sound; reads it if this process has neither fetched nor checked it.

        The caller holds its lock, shared or alone.
        """
        entry = self._store.look(url)
        if entry is None:
            return False
        if sha256 is not None and self._sha256(url, entry) != sha256.lower():
            return False
        key, state = key_of(url), self._state(url)
        if self._sound.get(key) == state:
            return True
        if self._damaged.get(key) == state:
            return False
        if self._matches(url, entry):
            self._sound[key] = state
            return True
        self._damaged[key] = state
        with self._tallies.of(source_of(url)) as tally:
            tally.corrupt += 1
        return False

    def _matches(self, url: str, entry: CacheEntry) -> bool:
        if entry.sha256 is not None:
            return digest_of(self._store.path(url), "sha256") == entry.sha256
        algorithm, _, digest = (entry.source or "").partition(":")
        source = Checksum(algorithm, digest)
        return bool(algorithm) and digest_of(self._store.path(url), algorithm) == source.digest

    def _sha256(self, url: str, entry: CacheEntry) -> str | None:
        if entry.sha256 is not None:
            return entry.sha256
        key, state = key_of(url), self._state(url)
        if key not in self._digests or self._digests[key][0] != state:
            self._digests[key] = (state, digest_of(self._store.path(url), "sha256") or "")
        return self._digests[key][1]

    def _state(self, url: str) -> State:
        try:
            found = self._store.path(url).stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _stuck(self, url: str) -> Callable[[float], Exception]:
        def error(waited_s: float) -> Exception:
            return CacheError(
                f"{shown(url)}: another process or thread is fetching it and has made no progress for {waited_s:.0f} s "
                f"(lock {self._store.lock(url).path}); stop that process, or raise timeout_s"
            )

        return error

    def _no_room(self, url: str) -> Callable[[float], Exception]:
        def error(waited_s: float) -> Exception:
            cap, directory = self._store.cap_bytes, self._store.directory
            return CacheError(
                f"{shown(url)}: no room in {directory} after {waited_s:.0f} s: all of its {cap} bytes are files in use "
                "or being fetched; raise cap_bytes, or keep fewer files open at a time"
            )

        return error
