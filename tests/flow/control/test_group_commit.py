# SPDX-License-Identifier: Apache-2.0
"""One write of the record for all events that wait, and nothing is told before it."""

from __future__ import annotations

import threading

from paceline.flow.control.recovery import GroupCommit
from tests.flow.control.cluster import SOON, wait_for


class Bench:
    """A state that is a list of events; a write ends when the test lets it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.state: list[str] = []
        self.dirty = False
        self.written: list[bytes] = []
        self.told: list[tuple[str, int]] = []  # with the number of writes before it
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.commits = GroupCommit(self.lock, self.changed, self.write)

    def changed(self) -> bytes | None:
        dirty, self.dirty = self.dirty, False
        return ",".join(self.state).encode() if dirty else None

    def write(self, state: bytes) -> None:
        self.begun.release()
        assert self.may_end.acquire(timeout=SOON)
        self.written.append(state)

    def event(self, name: str, dirty: bool = True) -> None:
        with self.lock:
            self.state.append(name)
            self.dirty = self.dirty or dirty
            self.commits.add(lambda: self.told.append((name, len(self.written))))
            self.commits.flush()

    def start(self, name: str, dirty: bool = True) -> threading.Thread:
        thread = threading.Thread(target=self.event, args=(name, dirty), daemon=True)
        thread.start()
        return thread


def test_events_that_come_during_a_write_share_the_next_one() -> None:
    bench = Bench()
    threads = [bench.start("a")]
    assert bench.begun.acquire(timeout=SOON)
    threads += [bench.start(name) for name in "bcd"]
    wait_for(lambda: len(bench.commits._calls) == 4)  # the lock is free during the write
    assert bench.told == []
    bench.may_end.release()
    assert bench.begun.acquire(timeout=SOON)
    assert bench.told == [("a", 1)]
    bench.may_end.release()
    for thread in threads:
        thread.join(SOON)
    assert bench.written[0] == b"a" and len(bench.written) == 2 and len(bench.written[1]) == len(b"a,b,c,d")
    assert sorted(bench.told[1:]) == [("b", 2), ("c", 2), ("d", 2)]


def test_what_changes_nothing_is_told_after_a_write_that_goes_on() -> None:
    """It may tell of an event that is not on the disk yet."""
    bench = Bench()
    bench.event("first", dirty=False)
    assert bench.told == [("first", 0)] and bench.written == []
    threads = [bench.start("a")]
    assert bench.begun.acquire(timeout=SOON)
    threads.append(bench.start("b", dirty=False))
    wait_for(lambda: len(bench.commits._calls) == 2)
    assert bench.told == [("first", 0)]
    bench.may_end.release()
    for thread in threads:
        thread.join(SOON)
    assert bench.told == [("first", 0), ("a", 1), ("b", 1)] and bench.written == [b"first,a"]


def test_after_close_the_record_stays_as_it_is() -> None:
    """A server that is closed may have threads that write; its successor has read the record."""
    bench = Bench()
    threads = [bench.start("a")]
    assert bench.begun.acquire(timeout=SOON)
    threads.append(bench.start("b"))
    wait_for(lambda: len(bench.commits._calls) == 2)

    def close() -> None:
        with bench.lock:
            bench.commits.close()

    threads.append(threading.Thread(target=close, daemon=True))
    threads[-1].start()
    for _ in range(2):
        bench.may_end.release()
    for thread in threads:
        thread.join(SOON)
    assert bench.written == [b"a", b"a,b"]
    bench.event("c")
    assert bench.written == [b"a", b"a,b"]
