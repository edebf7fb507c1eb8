# SPDX-License-Identifier: Apache-2.0
"""What a cache has done, by source."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

logger = logging.getLogger("paceline")


@dataclass
class Stats:
    """Counts of one source (`scheme://host-or-bucket`).

    `hits` and `misses` count calls of `open`: a hit found its file in the cache, a miss waited for a download, also
    for one that was already running. `fetched_bytes` counts bytes from the source, corrupt downloads included;
    `waited_s` is the time that `open` took; `retries` are tries after the first; `corrupt` counts downloads with a
    wrong size or checksum and files found damaged on disk.
    """

    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    waited_s: float = 0.0
    retries: int = 0
    corrupt: int = 0


class Counters:
    """The counts of one process by source, and which sources do not answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, Stats] = {}
        self._lost: set[str] = set()

    @contextmanager
    def of(self, source: str) -> Iterator[Stats]:
        """The counts of a source, to be changed."""
        with self._lock:
            yield self._of.setdefault(source, Stats())

    def copy(self) -> dict[str, Stats]:
        """The counts as they are now."""
        with self._lock:
            return {source: replace(stats) for source, stats in self._of.items()}

    def mark_lost(self, source: str, why: object) -> None:
        """A source does not answer; warn once until it is back."""
        with self._lock:
            was_lost = source in self._lost
            self._lost.add(source)
        if not was_lost:
            logger.warning("%s does not answer (%s); going on with what is in the cache", source, why)

    def is_lost(self, source: str) -> bool:
        """Whether the last download from it failed."""
        with self._lock:
            return source in self._lost

    def mark_back(self, source: str) -> None:
        """A source answers again."""
        with self._lock:
            was_lost = source in self._lost
            self._lost.discard(source)
        if was_lost:
            logger.warning("%s answers again", source)
