# SPDX-License-Identifier: Apache-2.0
"""Remote files as local paths: fetched once a host, checked, kept under a cap, and prefetched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.urls import local_path, source_of
from paceline.core import runtime
from paceline.errors import ClosedError, NotServedError
from paceline_plugins.data.cache.checksums import digest_of
from paceline_plugins.data.cache.directory import CacheDirectory
from paceline_plugins.data.cache.download import Downloader
from paceline_plugins.data.cache.evict import EvictionRank
from paceline_plugins.data.cache.get import FileGetter
from paceline_plugins.data.cache.names import key_of
from paceline_plugins.data.cache.prefetch_hints import PrefetchHints
from paceline_plugins.data.cache.prefetcher import Prefetcher
from paceline_plugins.data.cache.stats import Counters, Stats

LOST_REST_S = 5.0
"""Pause of prefetching after a source did not answer."""


class Cache:
    """A directory of files fetched from elsewhere, shared by all processes of a host that name the same directory.

    ::

        with Cache("/scratch/cache", cap_bytes=200 << 30) as cache:
            cache.prefetch(urls)
            for url in urls:
                with cache.open(url) as path:
                    ...

    >>> import tempfile
    >>> from paceline_plugins.data import Cache
    >>> with Cache(tempfile.mkdtemp(), cap_bytes=1_000_000) as cache:
    ...     cache.stats()  # by source: hits, misses, bytes
    {}

    All processes should give the same cap. The object may be sent to other processes (it opens the directory again
    there) and survives a fork. Each process has its own prefetch list and its own counts.

    Args:
        directory: on this host, created where it is missing; `~/.cache/paceline` if None.
        cap_bytes: the most that files may fill; None: the whole disk, where a full disk evicts old files.
        threads: concurrent downloads of prefetching.
        retries: tries after the first, with exponential backoff.
        timeout_s: how long a source or another process may make no progress before that is an error.
        options: for the source; see :func:`paceline_plugins.data.cache.download.backend_for`.

    Raises:
        ValueError: a number is out of range.
        CacheError: the directory cannot be made or written.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        cap_bytes: int | None = None,
        *,
        threads: int = 4,
        retries: int = 5,
        timeout_s: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_numbers(cap_bytes, threads, retries, timeout_s)
        self.directory = Path(directory).absolute() if directory is not None else default_directory()
        self.cap_bytes, self.threads, self.retries, self.timeout_s = cap_bytes, threads, retries, timeout_s
        self.options = dict(options or {})
        self._closed = False
        self._open_directory()

    def _open_directory(self) -> None:
        """Open the directory in this process."""
        self._process = os.getpid()
        self._directory = CacheDirectory(self.directory, self.cap_bytes, self.timeout_s)
        self._directory.complete_bytes()  # fails now if the directory cannot be used
        self._counters = Counters()
        self._downloader = Downloader(self.options, self.retries, self.timeout_s, self._counters)
        self._getter = FileGetter(self._directory, self._downloader, self._counters, self.timeout_s)
        self._hints = PrefetchHints(self.directory)
        self._prefetcher = Prefetcher(self.threads, self._hints, self._fetch, self._rest)
        self._directory.evictor.on_prefetched = self._prefetcher.evicted
        runtime.end_at_exit(self, Cache.close)

    def __getstate__(self) -> dict[str, Any]:
        names = ("directory", "cap_bytes", "threads", "retries", "timeout_s", "options")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._closed = False
        self._open_directory()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the cache of {self.directory} is closed; open a new Cache")
        self._after_fork()

    def _after_fork(self) -> None:
        if self._process != os.getpid():
            self._open_directory()

    @contextmanager
    def open(self, url: str, sha256: str | None = None) -> Iterator[Path]:
        """The file on this host, which stays there within the context; a local path is returned as it is.

        Args:
            url: a URL or a local path.
            sha256: 64 hexadecimal digits that the content must have.

        Raises:
            NotServedError: there is no such file, or it may not be read.
            CorruptFileError: no download had the checksum of the source or of `sha256`.
            CacheError: the source does not answer, there is no room, or the directory is gone.
        """
        local = local_path(url)
        if local is not None:
            yield _checked(local, sha256)
            return
        self._check()
        began = time.perf_counter()
        hit: bool | None = None
        try:
            lock, hit = self._getter.pin(url, sha256, self._rank(None))
        finally:
            with self._counters.of(source_of(url)) as stats:
                stats.waited_s += time.perf_counter() - began
                stats.hits, stats.misses = stats.hits + (hit is True), stats.misses + (hit is False)
        self._prefetcher.used(key_of(url))
        try:
            yield self._directory.file(url)
        finally:
            lock.release()
            self._prefetcher.room_freed()

    def read(self, url: str) -> bytes:
        """The bytes of a file; errors as `open`."""
        with self.open(url) as path:
            return path.read_bytes()

    def prefetch(self, urls: Iterable[str]) -> None:
        """Fetch these in the background, in this order, and drop the earlier list.

        Prefetching pauses while the cap is full of files that are in use or still to be opened. It never evicts an
        open file, one that comes earlier in the list and has not been opened yet, or one that another process has
        prefetched. A file that cannot be fetched is skipped; `open` raises the error.
        """
        self._check()
        self._prefetcher.prefetch(url for url in urls if local_path(url) is None)

    def cached(self, urls: Iterable[str]) -> set[str]:
        """The URLs whose files are in the cache now, and all local paths."""
        self._check()
        return {url for url in urls if local_path(url) is not None or self._directory.lookup(url) is not None}

    def stats(self) -> dict[str, Stats]:
        """This process's counts by source (`scheme://host-or-bucket`); those of a `DataLoader` have their own."""
        if not self._closed:
            self._after_fork()
        return self._counters.copy()

    def close(self) -> None:
        """Stop prefetching; the files stay. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._process == os.getpid():
            self._downloader.closed.set()
            self._prefetcher.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _rank(self, position: int | None) -> EvictionRank:
        """Which files are evictable: for the file at `position` of the prefetch list, or (None) for `open`."""
        prefetcher, hinted = self._prefetcher, list[set[str]]()

        def rank(key: str) -> int | None:
            own = prefetcher.position(key)
            if own is not None:
                return len(prefetcher) + 1 - own if position is None or own > position else None
            if not hinted:
                hinted.append(self._hints.of_other_processes())
            if key in hinted[0]:
                return None if position is not None else len(prefetcher) + 2
            return 0

        return rank

    def _fetch(self, url: str, position: int, turn: Callable[[], bool]) -> bool:
        return self._getter.prefetch(url, self._rank(position), turn, partial(self._prefetcher.reserved, position))

    def _rest(self, url: str) -> float:
        return LOST_REST_S if self._counters.is_lost(source_of(url)) else 0.0


def check_numbers(cap_bytes: int | None, threads: int, retries: int, timeout_s: float) -> None:
    """Raise ValueError for settings out of range."""
    if cap_bytes is not None and cap_bytes <= 0:
        raise ValueError(f"cap_bytes={cap_bytes} leaves no room for any file; give a positive number, or None")
    if threads < 1:
        raise ValueError(f"threads={threads}: fetching needs at least one thread")
    if retries < 0:
        raise ValueError(f"retries={retries}: give 0 or more")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s}: give a number of seconds above 0")


def default_directory() -> Path:
    """`paceline` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paceline"


def _checked(path: Path, sha256: str | None) -> Path:
    """A local path that exists and has the given digest."""
    if not path.exists():
        raise NotServedError(f"{path}: there is no such file; check the path")
    if sha256 is not None:
        seen = digest_of(path, "sha256")
        if seen != sha256.lower():
            raise NotServedError(f"{path}: its SHA-256 is {seen}, not {sha256}; is it the right file?")
    return path
