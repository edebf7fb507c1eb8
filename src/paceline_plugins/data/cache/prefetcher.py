# SPDX-License-Identifier: Apache-2.0
"""Threads that fetch files before they are opened, in the order in which they will be opened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

from paceline.core import runtime
from paceline_plugins.data.cache.names import key_of
from paceline_plugins.data.cache.prefetch_hints import PrefetchHints

ROOM_PAUSE_S = 0.25
"""Between two looks for room that other processes may have made."""


Fetch = Callable[[str, int, Callable[[], bool]], bool]
"""(url, position, turn): fetches one file; False: there is no room now. It reserves room only if `turn()` is True."""


class Prefetcher:
    """A list of files and the threads that fetch them.

    Requests run side by side, but room is reserved strictly in the order of the list. After an error of `fetch` the
    file is skipped, and the thread pauses for `rest(url)` seconds.
    """

    def __init__(self, threads: int, hints: PrefetchHints, fetch: Fetch, rest: Callable[[str], float]) -> None:
        self._hints, self._fetch, self._rest = hints, fetch, rest
        self._changed = threading.Condition()
        self._list: list[str] = []
        self._positions: dict[str, list[int]] = {}  # of files not yet opened, by key, the next position last
        self._next, self._generation, self._closed = 0, 0, False
        self._before_room: set[int] = set()  # positions that have not reserved room yet
        self._without_room: set[int] = set()  # those of them for which there was none
        self._fetching: set[str] = set()
        self._evicted: set[str] = set()  # while they were being fetched
        self._prefetched: set[str] = set()
        self._count, self._threads = threads, list[threading.Thread]()

    def prefetch(self, urls: Iterable[str]) -> None:
        """Replace the list."""
        wanted = list(urls)
        with self._changed:
            self._generation += 1
            self._list, self._next, self._before_room, self._without_room = wanted, 0, set(), set()
            self._positions = {}
            for position in reversed(range(len(wanted))):
                self._positions.setdefault(key_of(wanted[position]), []).append(position)
            for key in self._prefetched - set(self._positions):
                self._hints.remove(key)
            self._prefetched &= set(self._positions)
            self._changed.notify_all()
            while wanted and not self._closed and len(self._threads) < self._count:
                thread = runtime.thread(self._work, "paceline-cache")
                self._threads.append(thread)
                thread.start()

    def used(self, key: str) -> None:
        """A file has been opened: drop its first position."""
        with self._changed:
            positions = self._positions.get(key)
            if not positions:
                return
            positions.pop()
            if not positions:
                del self._positions[key]
                self._prefetched.discard(key)
                self._hints.remove(key)
            self._changed.notify_all()

    def position(self, key: str) -> int | None:
        """The next position of a file in the list."""
        with self._changed:
            positions = self._positions.get(key)
            return positions[-1] if positions else None

    def __len__(self) -> int:
        """Files of the list that have not been opened."""
        with self._changed:
            return len(self._positions)

    def evicted(self, key: str) -> None:
        """A prefetched file was evicted: fetch it again."""
        with self._changed:
            self._prefetched.discard(key)
            self._hints.remove(key)
            if key in self._fetching:
                self._evicted.add(key)
            if key in self._positions:
                self._next = min(self._next, self._positions[key][-1])

    def close(self) -> None:
        """Stop the threads; they abandon running downloads at their next pause or end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(1.0)
        with self._changed:
            self._hints.close()

    def _take(self) -> tuple[int, str, int] | None:
        """The next (position, url, generation); None when closed."""
        with self._changed:
            while not self._closed:
                while self._next < len(self._list):
                    position, url = self._next, self._list[self._next]
                    self._next += 1
                    if self._is_next(key_of(url), position):
                        self._fetching.add(key_of(url))
                        self._before_room.add(position)
                        return position, url, self._generation
                self._changed.wait()
            return None

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            position, url, generation = taken
            pause = self._bring(position, url, generation)
            with self._changed:
                self._done(key_of(url), position, generation)
                if pause and not self._closed:
                    self._changed.wait(pause)

    def _done(self, key: str, position: int, generation: int) -> None:
        """End work on a position; go back to another position of the file that was skipped meanwhile."""
        self._fetching.discard(key)
        if generation == self._generation:
            self._leave(position)
        positions = self._positions.get(key)
        if positions and key not in self._prefetched and (generation != self._generation or position not in positions):
            self._next = min(self._next, positions[-1])
            self._changed.notify_all()

    def _bring(self, position: int, url: str, generation: int) -> float:
        """Fetch one file, waiting for room while it is in the list; return the seconds to pause."""
        key = key_of(url)
        while True:
            with self._changed:
                if not self._is_wanted(key, position, generation):
                    return 0.0
                self._evicted.discard(key)
            try:
                done = self._fetch(url, position, partial(self._turn, position, generation))
            except Exception:  # `open` meets it again
                return self._rest(url)
            with self._changed:
                if done and key not in self._evicted:
                    if self._is_wanted(key, position, generation):
                        self._prefetched.add(key)
                        self._hints.add(key)
                    return 0.0
                if generation == self._generation:
                    self._before_room.add(position)
                    self._without_room.add(position)
                    self._changed.notify_all()
                self._changed.wait(ROOM_PAUSE_S)

    def _turn(self, position: int, generation: int) -> bool:
        """Wait until all earlier positions have reserved room; False: there is none for one of them."""
        with self._changed:
            while not self._closed and generation == self._generation:
                earlier = {other for other in self._before_room if other < position}
                if not earlier:
                    return True
                if earlier & self._without_room:
                    return False
                self._changed.wait()
        return False

    def reserved(self, position: int) -> None:
        """Called by `fetch` when it has reserved room, so that the next position may."""
        with self._changed:
            self._leave(position)

    def _leave(self, position: int) -> None:
        self._before_room.discard(position)
        self._without_room.discard(position)
        self._changed.notify_all()

    def room_freed(self) -> None:
        """There may be room now."""
        with self._changed:
            self._changed.notify_all()

    def _is_next(self, key: str, position: int) -> bool:
        is_next = self._positions.get(key, [])[-1:] == [position]
        return is_next and key not in self._prefetched and key not in self._fetching

    def _is_wanted(self, key: str, position: int, generation: int) -> bool:
        return not self._closed and generation == self._generation and position in self._positions.get(key, ())
