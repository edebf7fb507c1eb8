# SPDX-License-Identifier: Apache-2.0
"""What a cache has done, by source."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace

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

    def plus(self, other: Stats, sign: int = 1) -> Stats:
        """The sum; with `sign` -1 the difference."""
        return Stats(*(mine + sign * theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def added(several: Iterable[Mapping[str, Stats]]) -> dict[str, Stats]:
    """The sum of several counts, source by source."""
    total: dict[str, Stats] = {}
    for counts in several:
        for source, stats in counts.items():
            total[source] = total.get(source, Stats()).plus(stats)
    return total


class Counters:
    """The counts of one process by source, and which sources do not answer; `on_change` sees every change."""

    def __init__(self, on_change: Callable[[str, Stats], None]) -> None:
        self._lock, self._on_change = threading.Lock(), on_change
        self._of: dict[str, Stats] = {}
        self._lost: set[str] = set()

    @contextmanager
    def of(self, source: str) -> Iterator[Stats]:
        """The counts of a source, to be changed."""
        with self._lock:
            stats = self._of.setdefault(source, Stats())
            yield stats
            self._on_change(source, stats)

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
