# SPDX-License-Identifier: Apache-2.0
"""Group commit: one write of the record for all events that wait, then the messages that depend on it.

While one thread writes, the other threads carry out their events; the next write has all of them. Each thread waits
until the record has its own event (D. DeWitt et al., Implementation Techniques for Main Memory Database Systems, SIGMOD
1984).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from paceline.core import runtime


class GroupCommit:
    """The writer of the record, and the queue of what is sent after it.

    Args:
        lock: of the state; a caller of `add` and `flush` holds it, once.
        changed: with the lock held: the state to write; None if nothing has changed.
        write: writes that state, without the lock.
    """

    def __init__(
        self, lock: threading.RLock, changed: Callable[[], bytes | None], write: Callable[[bytes], None]
    ) -> None:
        self._lock, self._changed, self._write = lock, changed, write
        self._idle = runtime.Condition(lock)
        self._busy = False
        self._calls: deque[Callable[[], object]] = deque()
        self._flushes = self._done = 0

    def add(self, call: Callable[[], object]) -> None:
        """`call` tells of an event: it is made once the record has that event, with the lock held, in order."""
        self._calls.append(call)

    def flush(self) -> None:
        """Return once the record has all events so far, and all calls so far are made; the lock is free meanwhile."""
        self._flushes += 1
        mine = self._flushes
        while self._done < mine:
            if self._busy:
                self._idle.wait()
            else:
                self._round()

    def close(self) -> None:
        """Flush, and write nothing more: a successor may read the record. The caller sees to it that no call tells."""
        self.flush()
        while self._busy:
            self._idle.wait()
        self._changed = lambda: None

    def _round(self) -> None:
        """One write, and the calls that waited for it."""
        self._busy, number, count = True, self._flushes, len(self._calls)
        try:
            state = self._changed()
            if state is not None:
                self._lock.release()
                try:
                    self._write(state)
                finally:
                    self._lock.acquire()
            for _ in range(count):
                self._calls.popleft()()
            self._done = number
        finally:
            self._busy = False
            self._idle.notify_all()
