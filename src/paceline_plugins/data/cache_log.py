# SPDX-License-Identifier: Apache-2.0
"""Finds the caches of a run's data sets, and logs their statistics."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline_plugins.data.cache import Cache, Stats

TELL_EVERY_S = 5.0
"""The least time between two events of a cache, but for the last one."""


class CacheLog:
    """Logs the statistics of the caches of all shared data sets.

    A `cache` event holds the totals of one cache since it was made, by source; it is written when they have changed.
    The field `cache` tells the caches of one host apart.

    Args:
        note: writes an event: called with its kind and its fields.
        every_s: the least time between two events of a cache.
    """

    def __init__(self, note: Callable[..., None], every_s: float = TELL_EVERY_S) -> None:
        self._note, self._every_s = note, every_s
        self._caches: list[Cache] = []
        self._told: dict[int, Mapping[str, Stats]] = {}
        self._at = time.monotonic()

    def add(self, data: Any) -> None:
        known = {id(cache) for cache in self._caches}
        self._caches += [cache for cache in caches_of(data) if id(cache) not in known]

    def tell(self, *, now: bool = False) -> None:
        """Write the totals that have changed, at most every `every_s` seconds unless `now`."""
        if not self._caches or not (now or time.monotonic() - self._at >= self._every_s):
            return
        self._at = time.monotonic()
        for cache in self._caches:
            stats = cache.stats()
            if stats and stats != self._told.get(id(cache)):
                self._told[id(cache)] = stats
                name = f"{os.getpid()}-{id(cache):x}"
                self._note("cache", cache=name, directory=str(cache.directory), sources=_totals(stats))


def _totals(stats: Mapping[str, Stats]) -> dict[str, dict[str, float]]:
    return {
        source: {
            "hits": one.hits,
            "misses": one.misses,
            "bytes": one.fetched_bytes,
            "waited_s": round(one.waited_s, 6),
            "retries": one.retries,
            "corrupt": one.corrupt,
        }
        for source, one in stats.items()
    }


def caches_of(data: Any) -> list[Cache]:
    """The caches of a data set and of its parts, such as those of `Subset` and `ConcatDataset`; each once.

    A data set shows its cache as the attribute `cache`, and its parts as `dataset` or `datasets`.
    """
    from paceline_plugins.data.cache import Cache, Files

    found: dict[int, Cache] = {}
    waiting, seen = deque([data]), dict[int, Any]()  # kept, so that ids stay unique
    while waiting:
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if not (isinstance(one, Files) and one.local):  # its attribute would make a cache
            cache = _attribute(one, "cache")
            if isinstance(cache, Cache):
                found[id(cache)] = cache
        waiting += _parts(one)
    return list(found.values())


def _parts(data: Any) -> Iterator[Any]:
    inner, several = _attribute(data, "dataset"), _attribute(data, "datasets")
    if inner is not None:
        yield inner
    if isinstance(several, Mapping):  # a StackDataset
        yield from several.values()
    elif isinstance(several, (list, tuple)):  # not an iterator, which this would exhaust
        yield from several


def _attribute(data: Any, name: str) -> Any:
    """An attribute of the user's object; None if it has none, or the property raises."""
    with contextlib.suppress(AttributeError, PacelineError, OSError):
        return getattr(data, name)
    return None
