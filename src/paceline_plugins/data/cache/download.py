# SPDX-License-Identifier: Apache-2.0
"""One download: into a temporary file, checked, retried where another try may help."""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.urls import OBSTORE_SCHEMES, scheme_of, shown, source_of
from paceline.errors import CacheError, CorruptFileError
from paceline_plugins.data.cache.backend import Backend, RemoteFile, Unavailable
from paceline_plugins.data.cache.checksums import Checksum, fastest, hasher
from paceline_plugins.data.cache.ledger import FULL, explained
from paceline_plugins.data.cache.names import CacheEntry
from paceline_plugins.data.cache.obstore_backend import ObstoreBackend  # at import, so that it notices every later fork
from paceline_plugins.data.cache.regular_file import allocate, open_empty, write_all
from paceline_plugins.data.cache.stats import Counters


def backend_for(url: str, options: Mapping[str, Any], timeout_s: float) -> Backend:
    """The backend for a URL.

    Args:
        url: `s3://bucket/key`, `https://host/path`, or any URL of fsspec.
        options: `backend` ("obstore", "fsspec" or "http") overrides the choice; `checksums=False` ignores the
            source's checksums; the other options go to the backend: obstore's names (`endpoint`, `region`,
            `access_key_id`, ...) or those of fsspec's file system; `headers` for plain HTTP.
        timeout_s: of one request.
    """
    rest = {key: value for key, value in options.items() if key not in ("backend", "checksums")}
    backend = options.get("backend") or _default_backend(scheme_of(url))
    if backend == "obstore":
        return ObstoreBackend(url, rest, timeout_s)
    if backend == "http":
        from paceline_plugins.data.cache.http_backend import HttpBackend

        return HttpBackend(rest.get("headers", {}), timeout_s)
    if backend == "fsspec":
        from paceline_plugins.data.cache.fsspec_backend import FsspecBackend

        return FsspecBackend(url, rest)
    raise ValueError(f"there is no backend {backend!r}; options['backend'] is 'obstore', 'fsspec' or 'http'")


def _default_backend(scheme: str) -> str:
    if scheme in ("http", "https"):
        return "http"
    if scheme in OBSTORE_SCHEMES and importlib.util.find_spec("obstore") is not None:
        return "obstore"
    return "fsspec"


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 20.0

Reserve = Callable[["int | None"], bool]
"""Reserves so many bytes (None: unknown) for a download; False: there is no room now, give up."""


class CorruptDownload(Exception):
    """A complete download with a wrong size or checksum."""


class Downloader:
    """Downloads files of any source; `options` as for :func:`.backend_choice.backend_for`."""

    def __init__(self, options: Mapping[str, Any], retries: int, timeout_s: float, counters: Counters) -> None:
        self._options, self._retries, self._timeout_s, self._counters = options, retries, timeout_s, counters
        self._backends: dict[str, Backend] = {}
        self._lock = threading.Lock()
        self.closed = threading.Event()  # running downloads end at their next pause

    def fetch(
        self, url: str, part: Path, sha256: str | None, reserve: Reserve, evict: Callable[[int], bool]
    ) -> CacheEntry | None:
        """Download a file into `part`; None where there was no room.

        Args:
            url: the file.
            part: the temporary file.
            sha256: the digest that the caller requires.
            reserve: called before the first byte is written, and again at the end if the source did not give a size.
            evict: removes other files when the disk is full; False: there are none to remove.

        Raises:
            NotServedError: the source refuses the file.
            CorruptFileError: every try had a wrong size or checksum.
            CacheError: the source failed at every try, or the disk is full.
        """
        source, tries = source_of(url), 0
        while True:
            try:
                with self._backend(url).begin(url) as remote:
                    if not reserve(remote.size):
                        return None
                    entry = self._receive(url, part, remote, sha256)
                if remote.size is None and not reserve(entry.size):
                    return None
                self._counters.mark_back(source)
                return entry
            except (Unavailable, CorruptDownload) as error:
                tries += 1
                if tries > self._retries or self.closed.is_set():
                    raise self._final(url, error, tries) from None
                self._pause(source, tries)
            except OSError as error:
                self._make_room(part, error, evict)

    def _final(self, url: str, error: Exception, tries: int) -> CacheError:
        if isinstance(error, CorruptDownload):
            return CorruptFileError(
                f"{shown(url)} came wrong {tries} times: {error}; the file at its source is damaged or has changed "
                "(write it again), or its store's ETag is no MD5 (pass options={'checksums': False})"
            )
        self._counters.mark_lost(source_of(url), error)
        return CacheError(
            f"{shown(url)} is not in the cache and {source_of(url)} did not answer {tries} times: {error}; is the "
            "store up, and can this machine reach it?"
        )

    def _backend(self, url: str) -> Backend:
        root = "/".join(url.split("/", 3)[:3])
        with self._lock:
            if root not in self._backends:
                self._backends[root] = backend_for(url, self._options, self._timeout_s)
            return self._backends[root]

    def _pause(self, source: str, tries: int) -> None:
        """Exponential backoff with jitter, so that workers that failed together do not retry together."""
        with self._counters.of(source) as stats:
            stats.retries += 1
        longest = min(FIRST_PAUSE_S * 2 ** (tries - 1), LONGEST_PAUSE_S)
        self.closed.wait(longest * random.SystemRandom().uniform(0.5, 1.0))

    def _receive(self, url: str, part: Path, remote: RemoteFile, sha256: str | None) -> CacheEntry:
        checksum = remote.checksum if self._options.get("checksums", True) else None
        required = [found for found in (checksum, Checksum("sha256", sha256) if sha256 else None) if found is not None]
        # One checksum is enough to detect damage on disk, so a further one is computed only where there is none.
        hashers = {name: hasher(name) for name in {found.algorithm for found in required} or {fastest()}}
        size = self._write(url, part, remote, list(hashers.values()))
        digests = {name: str(running.hexdigest()) for name, running in hashers.items() if running is not None}
        self._check(url, size, remote.size, digests, required)
        other = checksum or next((Checksum(*found) for found in digests.items() if not required), None)
        return CacheEntry(url, size, digests.get("sha256"), str(other) if other else None)

    def _write(self, url: str, part: Path, remote: RemoteFile, hashers: list[Any]) -> int:
        size = 0
        try:
            with open_empty(part) as file:
                allocate(file.fileno(), remote.size or 0)
                for chunk in remote.chunks:
                    size += len(chunk)
                    if remote.size is not None and size > remote.size:
                        break
                    write_all(file, chunk)
                    for running in hashers:
                        running.update(chunk)
        finally:
            with self._counters.of(source_of(url)) as stats:
                stats.fetched_bytes += size
        return size

    def _check(
        self, url: str, size: int, expected: int | None, digests: Mapping[str, str], required: Sequence[Checksum]
    ) -> None:
        wrong = [f"{expected} bytes expected, {size} seen"] if expected is not None and size != expected else []
        for checksum in required:
            if digests[checksum.algorithm] != checksum.digest.lower():
                wrong.append(f"{checksum} expected, {digests[checksum.algorithm]} seen")
        if wrong:
            with self._counters.of(source_of(url)) as stats:
                stats.corrupt += 1
            raise CorruptDownload("; ".join(wrong))

    @staticmethod
    def _make_room(part: Path, error: OSError, evict: Callable[[int], bool]) -> None:
        """On a full disk evict at least as many bytes as were written; raise where nothing can be evicted."""
        if error.errno not in FULL:
            with explained(part.parent):
                raise error
        written = part.stat().st_size if part.exists() else 0
        part.unlink(missing_ok=True)
        if not evict(max(written, 1)):
            raise CacheError(
                f"the disk of the cache directory {part.parent} is full: {part} could not be written beyond {written} "
                "bytes, and the cache has nothing more to remove; free some room, or give another directory"
            ) from error
