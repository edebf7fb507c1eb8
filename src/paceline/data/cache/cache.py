# SPDX-License-Identifier: Apache-2.0
"""Remote files as local paths: fetched once a host, checked, kept under a cap, and there before they are asked for."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paceline.data.cache.checksums import digest_of
from paceline.data.cache.directory import CacheDirectory
from paceline.data.cache.download import Downloader
from paceline.data.cache.evict import EvictionRank
from paceline.data.cache.get import FileGetter
from paceline.data.cache.names import key_of
from paceline.data.cache.prefetch_hints import PrefetchHints
from paceline.data.cache.prefetcher import Prefetcher
from paceline.data.cache.stats import Counters, Stats, added
from paceline.data.cache.stats_files import StatsFile, StatsFileName
from paceline.data.cache.urls import local_path, source_of
from paceline.errors import ClosedError, NotServedError

LOST_REST_S = 5.0
"""How long the background leaves a source alone that did not answer."""


class Cache:
    """A directory of files fetched from elsewhere, shared by all processes of a host that name the same directory.

    ::

        with Cache("/scratch/cache", cap_bytes=200 << 30) as cache:
            cache.prefetch(urls)
            for url in urls:
                with cache.open(url) as path:
                    ...

    >>> import tempfile
    >>> from paceline.data import Cache
    >>> with Cache(tempfile.mkdtemp(), cap_bytes=1_000_000) as cache:
    ...     cache.stats()  # by source: hits, misses, bytes
    {}

    All processes should give the same cap. The object may be sent to other processes (it opens the directory again
    there) and survives a fork; wishes stay with the process that made them, and so do counts, which `stats` adds up.

    Args:
        directory: on this host, made where it is missing; `~/.cache/paceline` if None.
        cap_bytes: the most that files may fill; None: what the disk has, where a full disk makes old files go.
        threads: downloads at a time in the background.
        retries: further tries after the first that failed, with longer and longer pauses.
        timeout_s: how long a source, another process or a file in use may stand still before that is an error.
        options: for the source; see :func:`paceline.data.cache.backend_choice.backend_for`.

    Raises:
        ValueError: a number that makes no sense.
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
        self._begin(None)

    def _begin(self, sheet: StatsFileName | None) -> None:
        """Open the directory in this process; `sheet` is that of the object that this is a copy of."""
        self._process = os.getpid()
        self._store = CacheDirectory(self.directory, self.cap_bytes, self.timeout_s)
        self._store.complete_bytes()  # says now whether the directory can be used
        self._sheet = (
            StatsFile.of_copy(self.directory, sheet) if sheet is not None else StatsFile.of_first(self.directory)
        )
        self._let_go = weakref.finalize(self, self._sheet.close)
        self._tallies = Counters(self._sheet.put)
        self._downloader = Downloader(self.options, self.retries, self.timeout_s, self._tallies)
        self._obtainer = FileGetter(self._store, self._downloader, self._tallies, self.timeout_s)
        self._wishes = PrefetchHints(self.directory)
        self._fetcher = Prefetcher(self.threads, self._wishes, self._ahead, self._rest)
        self._store.evictor.on_wished = self._fetcher.evicted

    def __getstate__(self) -> dict[str, Any]:
        names = ("directory", "cap_bytes", "threads", "retries", "timeout_s", "options")
        return {**{name: getattr(self, name) for name in names}, "sheet": self._sheet.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: value for name, value in state.items() if name != "sheet"})
        self._closed = False
        self._begin(state.get("sheet"))

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the cache of {self.directory} is closed; open a new Cache")
        self._after_fork()

    def _after_fork(self) -> None:
        if self._process != os.getpid():
            self._begin(self._sheet.name)

    @contextmanager
    def open(self, url: str, sha256: str | None = None) -> Iterator[Path]:
        """The file on this host; it stays there as long as the context lasts. A local path is itself.

        Args:
            url: a url or a local path.
            sha256: 64 hexadecimal digits that the content must have.

        Raises:
            NotServedError: there is no such file, or it may not be read.
            CorruptFileError: no download of it was what the source or `sha256` says.
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
            lock, hit = self._obtainer.pin(url, sha256, self._rank(None))
        finally:
            with self._tallies.of(source_of(url)) as tally:
                tally.waited_s += time.perf_counter() - began
                tally.hits, tally.misses = tally.hits + (hit is True), tally.misses + (hit is False)
        self._fetcher.used(key_of(url))
        try:
            yield self._store.path(url)
        finally:
            lock.release()
            self._fetcher.nudge()

    def read(self, url: str) -> bytes:
        """The bytes of a file; errors as `open`."""
        with self.open(url) as path:
            return path.read_bytes()

    def prefetch(self, urls: Iterable[str]) -> None:
        """Fetch these in the background, in this order, and forget the list given before.

        Fetching goes on until the list is done or the cap is full of files that are in use or wished for, and goes on
        when some of them have been opened. It never removes a file that is open, that comes earlier in the list and
        has not been opened yet, or that another process has fetched ahead. What cannot be fetched is left out;
        whoever opens it meets the error.
        """
        self._check()
        self._fetcher.wish(url for url in urls if local_path(url) is None)

    def cached(self, urls: Iterable[str]) -> set[str]:
        """Those of the urls whose files are here now; local paths are always here."""
        self._check()
        return {url for url in urls if local_path(url) is not None or self._store.look(url) is not None}

    def stats(self) -> dict[str, Stats]:
        """The counts by source (`scheme://host-or-bucket`), of this process and of the copies that it gave away.

        So the processes of a `DataLoader` are in it, those too that have ended or were killed. In such a process it is
        what that process has done. After `close` it stays as it was then.
        """
        if not self._closed:
            self._after_fork()
        return added([self._tallies.copy(), self._sheet.of_copies()])

    def close(self) -> None:
        """Stop fetching; the files stay. Twice is once."""
        if self._closed:
            return
        self._closed = True
        if self._process == os.getpid():
            self._downloader.close()
            self._fetcher.close()
            self._let_go()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _rank(self, place: int | None) -> EvictionRank:
        """What may be removed: for the file at `place` of the wish list, or (None) for one that is needed now."""
        fetcher, others = self._fetcher, list[set[str]]()

        def rank(key: str) -> int | None:
            own = fetcher.place(key)
            if own is not None:
                return len(fetcher) + 1 - own if place is None or own > place else None
            if not others:
                others.append(self._wishes.of_others())
            if key in others[0]:
                return None if place is not None else len(fetcher) + 2
            return 0

        return rank

    def _ahead(self, url: str, place: int, turn: Callable[[], bool]) -> bool:
        return self._obtainer.ahead(url, self._rank(place), turn, partial(self._fetcher.took_room, place))

    def _rest(self, url: str) -> float:
        return LOST_REST_S if self._tallies.is_lost(source_of(url)) else 0.0


def check_numbers(cap_bytes: int | None, threads: int, retries: int, timeout_s: float) -> None:
    """Raise ValueError for settings that make no sense."""
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
    """A local path, if it is there and is what it should be."""
    if not path.exists():
        raise NotServedError(f"{path}: there is no such file; check the path")
    if sha256 is not None:
        seen = digest_of(path, "sha256")
        if seen != sha256.lower():
            raise NotServedError(f"{path}: its SHA-256 is {seen}, not {sha256}; is it the right file?")
    return path
