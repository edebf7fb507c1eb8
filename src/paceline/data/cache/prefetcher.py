# SPDX-License-Identifier: Apache-2.0
"""Threads that fetch what will be asked for next, in the order in which it will be asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from paceline.data.cache.names import key_of
from paceline.data.cache.prefetch_hints import PrefetchHints

ROOM_PAUSE_S = 0.25
"""Between two looks for room that other processes may have made."""


class Fetch(Protocol):
    """Brings one file in the background."""

    def __call__(self, url: str, place: int, turn: Callable[[], bool]) -> bool:
        """False: there is no room now. Calls `turn` before it takes room; where that is False it gives up as well."""


class Prefetcher:
    """A wish list and the threads that work on it.

    Requests are answered side by side, but room is taken strictly in the order of the list.

    Args:
        threads: how many downloads at a time.
        wishes: where other processes see what was fetched ahead.
        fetch: brings one file; an error of it drops the wish, because whoever opens the file meets it again.
        rest: called after such an error with the url; gives the seconds to wait before the next try.
    """

    def __init__(self, threads: int, wishes: PrefetchHints, fetch: Fetch, rest: Callable[[str], float]) -> None:
        self._wishes, self._fetch, self._rest = wishes, fetch, rest
        self._changed = threading.Condition()
        self._list: list[str] = []
        self._places: dict[str, list[int]] = {}  # of what is still wished for, by key, the next place last
        self._next, self._generation, self._closed = 0, 0, False
        self._before_room: set[int] = set()  # places whose fetch has not yet taken room
        self._hungry: set[int] = set()  # those of them that wait for room
        self._busy: set[str] = set()
        self._gone: set[str] = set()  # removed again before whoever is busy with it has noted that it is there
        self._ahead: set[str] = set()
        self._count, self._threads = threads, list[threading.Thread]()

    def wish(self, urls: Iterable[str]) -> None:
        """Forget the earlier list and take this one."""
        wanted = list(urls)
        with self._changed:
            self._generation += 1
            self._list, self._next, self._before_room, self._hungry = wanted, 0, set(), set()
            self._places = {}
            for place in reversed(range(len(wanted))):
                self._places.setdefault(key_of(wanted[place]), []).append(place)
            for key in self._ahead - set(self._places):
                self._wishes.remove(key)
            self._ahead &= set(self._places)
            self._changed.notify_all()
            while wanted and not self._closed and len(self._threads) < self._count:
                thread = threading.Thread(target=self._work, name="paceline-cache", daemon=True)
                self._threads.append(thread)
                thread.start()

    def used(self, key: str) -> None:
        """A file has been opened: the first wish for it is fulfilled."""
        with self._changed:
            places = self._places.get(key)
            if not places:
                return
            places.pop()
            if not places:
                del self._places[key]
                self._ahead.discard(key)
                self._wishes.remove(key)
            self._changed.notify_all()

    def place(self, key: str) -> int | None:
        """The next place in the list at which a file is wished for."""
        with self._changed:
            places = self._places.get(key)
            return places[-1] if places else None

    def __len__(self) -> int:
        """Files that are still wished for."""
        with self._changed:
            return len(self._places)

    def evicted(self, key: str) -> None:
        """A file that was fetched ahead had to go: fetch it again when its turn comes."""
        with self._changed:
            self._ahead.discard(key)
            self._wishes.remove(key)
            if key in self._busy:
                self._gone.add(key)
            if key in self._places:
                self._next = min(self._next, self._places[key][-1])

    def close(self) -> None:
        """Stop the threads; downloads under way are given up at their next pause or end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(1.0)
        with self._changed:
            self._wishes.close()

    def _take(self) -> tuple[int, str, int] | None:
        """The next (place, url, generation); None when closed."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                while self._next < len(self._list):
                    place, url = self._next, self._list[self._next]
                    self._next += 1
                    if self._is_next(key_of(url), place):
                        self._busy.add(key_of(url))
                        self._before_room.add(place)
                        return place, url, self._generation
                self._changed.wait()

    def _work(self) -> None:
        while True:
            taken = self._take()
            if taken is None:
                return
            place, url, generation = taken
            pause = self._bring(place, url, generation)
            with self._changed:
                self._done(key_of(url), place, generation)
                if pause and not self._closed:
                    self._changed.wait(pause)

    def _done(self, key: str, place: int, generation: int) -> None:
        """This place has been worked on; whoever passed over another wish for the file meanwhile goes back to it."""
        self._busy.discard(key)
        if generation == self._generation:
            self._leave(place)
        places = self._places.get(key)
        if places and key not in self._ahead and (generation != self._generation or place not in places):
            self._next = min(self._next, places[-1])
            self._changed.notify_all()

    def _bring(self, place: int, url: str, generation: int) -> float:
        """Fetch one file, waiting for room as long as it is wished for; the seconds to rest afterwards."""
        key = key_of(url)
        while self._wanted(key, place, generation):
            with self._changed:
                self._gone.discard(key)
            try:
                done = self._fetch(url, place, partial(self._turn, place, generation))
            except Exception:  # met again by whoever opens the file
                return self._rest(url)
            with self._changed:
                if done and key not in self._gone:
                    if self._is_wanted(key, place, generation):
                        self._ahead.add(key)
                        self._wishes.add(key)
                    return 0.0
                if generation == self._generation:
                    self._before_room.add(place)
                    self._hungry.add(place)
                    self._changed.notify_all()
                self._changed.wait(ROOM_PAUSE_S)
        return 0.0

    def _turn(self, place: int, generation: int) -> bool:
        """Wait until everybody before this place has taken room; False: somebody before it cannot."""
        with self._changed:
            while not self._closed and generation == self._generation:
                earlier = {other for other in self._before_room if other < place}
                if not earlier:
                    return True
                if earlier & self._hungry:
                    return False
                self._changed.wait()
        return False

    def took_room(self, place: int) -> None:
        """Called by `fetch` when room is taken, so that the next one may take his."""
        with self._changed:
            self._leave(place)

    def _leave(self, place: int) -> None:
        self._before_room.discard(place)
        self._hungry.discard(place)
        self._changed.notify_all()

    def nudge(self) -> None:
        """There may be room now."""
        with self._changed:
            self._changed.notify_all()

    def _wanted(self, key: str, place: int, generation: int) -> bool:
        with self._changed:
            return self._is_wanted(key, place, generation)

    def _is_next(self, key: str, place: int) -> bool:
        places = self._places.get(key)
        return places is not None and places[-1] == place and key not in self._ahead and key not in self._busy

    def _is_wanted(self, key: str, place: int, generation: int) -> bool:
        return not self._closed and generation == self._generation and place in self._places.get(key, ())
