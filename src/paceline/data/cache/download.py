# SPDX-License-Identifier: Apache-2.0
"""One download: into a temporary file, checked, tried again after a pause if that may help."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.data.cache.backend import Backend, RemoteFile, Unavailable
from paceline.data.cache.backend_choice import backend_for
from paceline.data.cache.checksums import Checksum, hasher
from paceline.data.cache.ledger import FULL, told
from paceline.data.cache.names import CacheEntry
from paceline.data.cache.regular_file import open_regular
from paceline.data.cache.stats import Counters
from paceline.data.cache.urls import shown, source_of
from paceline.errors import CacheError, CorruptFileError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 20.0

Admit = Callable[["int | None"], bool]
"""Makes room for so many bytes (None: nobody knows how many); False: there is none now, give up."""


class CorruptDownload(Exception):
    """A download that came to its end and is not what it must be."""


class Downloader:
    """Fetches files of any source.

    Args:
        options: see :func:`paceline.data.cache.backend_choice.backend_for`.
        retries: tries after the first.
        timeout_s: of one request.
        tallies: where bytes, retries and spoiled downloads are counted.
    """

    def __init__(self, options: Mapping[str, Any], retries: int, timeout_s: float, tallies: Counters) -> None:
        self._options, self._retries, self._timeout_s, self._tallies = options, retries, timeout_s, tallies
        self._sources: dict[str, Backend] = {}
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def fetch(
        self, url: str, part: Path, sha256: str | None, admit: Admit, free: Callable[[int], bool]
    ) -> CacheEntry | None:
        """Fetch a file into `part`.

        Args:
            url: what to fetch.
            part: the temporary file.
            sha256: what the caller says that the content must have.
            admit: asked before anything is written, and once more at the end if the source did not tell the size.
            free: removes other files when the disk is full; False: there is nothing to remove.

        Returns:
            What the file is; None where there was no room.

        Raises:
            NotServedError: the source will not give it.
            CorruptFileError: what came was wrong at every try.
            CacheError: the source did not answer at any try, or the disk is full.
        """
        name, tries = source_of(url), 0
        while True:
            try:
                with self._source(url).begin(url) as remote:
                    if not admit(remote.size):
                        return None
                    entry = self._receive(url, part, remote, sha256)
                if remote.size is None and not admit(entry.size):
                    return None
                self._tallies.back(name)
                return entry
            except (Unavailable, CorruptDownload) as error:
                tries += 1
                if tries > self._retries or self.closed.is_set():
                    raise self._final(url, error, tries) from None
                self._pause(name, tries)
            except OSError as error:
                self._full(part, error, free)

    def close(self) -> None:
        """Give up what is under way at its next pause."""
        self.closed.set()

    def _final(self, url: str, error: Exception, tries: int) -> CacheError:
        if isinstance(error, CorruptDownload):
            return CorruptFileError(
                f"{shown(url)} came wrong {tries} times: {error}; the file at its source is damaged or has changed "
                "(write it anew), or its store's ETag is no MD5 (pass options={'checksums': False})"
            )
        self._tallies.lost(source_of(url), error)
        return CacheError(
            f"{shown(url)} is not in the cache and {source_of(url)} did not answer {tries} times: {error}; is the "
            "store up, and can this machine reach it?"
        )

    def _source(self, url: str) -> Backend:
        place = url.partition("://")[0] + "://" + url.partition("://")[2].partition("/")[0]
        with self._lock:
            if place not in self._sources:
                self._sources[place] = backend_for(url, self._options, self._timeout_s)
            return self._sources[place]

    def _pause(self, name: str, tries: int) -> None:
        """Twice as long each time, and never the same for two workers that failed together."""
        with self._tallies.of(name) as tally:
            tally.retries += 1
        longest = min(FIRST_PAUSE_S * 2 ** (tries - 1), LONGEST_PAUSE_S)
        self.closed.wait(longest * random.SystemRandom().uniform(0.5, 1.0))

    def _receive(self, url: str, part: Path, remote: RemoteFile, sha256: str | None) -> CacheEntry:
        checksum = remote.checksum if self._options.get("checksums", True) else None
        if checksum is not None and hasher(checksum.algorithm) is None:
            checksum = None  # this machine cannot compute it
        wanted = [found for found in (checksum, Checksum("sha256", sha256) if sha256 else None) if found is not None]
        # The source's own checksum tells damage on disk as well as SHA-256 would, and one pass less is worth having.
        hashers = {name: hasher(name) for name in {found.algorithm for found in wanted} or {"sha256"}}
        size = self._write(url, part, remote, list(hashers.values()))
        digests = {name: str(made.hexdigest()) for name, made in hashers.items() if made is not None}
        self._check(url, size, remote.size, digests, wanted)
        return CacheEntry(url, size, digests.get("sha256"), str(checksum) if checksum else None)

    def _write(self, url: str, part: Path, remote: RemoteFile, hashers: list[Any]) -> int:
        size = 0
        try:
            with os.fdopen(open_regular(part, os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as file:
                file.truncate(0)
                for chunk in remote.chunks:
                    size += len(chunk)
                    if remote.size is not None and size > remote.size:
                        break
                    write_all(file, chunk)
                    for made in hashers:
                        made.update(chunk)
        finally:
            with self._tallies.of(source_of(url)) as tally:
                tally.fetched_bytes += size
        return size

    def _check(
        self, url: str, size: int, expected: int | None, digests: Mapping[str, str], wanted: Sequence[Checksum]
    ) -> None:
        wrong = [f"{expected} bytes expected, {size} seen"] if expected is not None and size != expected else []
        for checksum in wanted:
            if digests[checksum.algorithm] != checksum.digest.lower():
                wrong.append(f"{checksum} expected, {digests[checksum.algorithm]} seen")
        if wrong:
            with self._tallies.of(source_of(url)) as tally:
                tally.corrupt += 1
            raise CorruptDownload("; ".join(wrong))

    @staticmethod
    def _full(part: Path, error: OSError, free: Callable[[int], bool]) -> None:
        """After a full disk: remove files as large as what has been written, at least, and go on; else say so."""
        if error.errno not in FULL:
            with told(part.parent):
                raise error
        written = part.stat().st_size if part.exists() else 0
        part.unlink(missing_ok=True)
        if not free(max(written, 1)):
            raise CacheError(
                f"the disk of the cache directory {part.parent} is full: {part} could not be written beyond {written} "
                "bytes, and the cache has nothing more to remove; free some room, or give another directory"
            ) from error


def write_all(file: Any, chunk: bytes) -> None:
    """Write every byte: an unbuffered file may take fewer than it is given."""
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]
