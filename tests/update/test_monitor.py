# SPDX-License-Identifier: Apache-2.0
"""What a run says about itself: folded lines, and what only asynchronous runs have to say."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.communication import Transport
from paceline.core.world import World
from paceline.observe.event_log import EventLog
from paceline.update import monitor as module
from paceline.update.exchange.exchanger import Timing
from paceline.update.monitor import Monitor

Events = Callable[[], list[dict[str, Any]]]

SYNCHRONOUS = {
    "kind", "at_s", "rank", "block", "exchanges", "minibatches", "total_minibatches", "samples", "total_samples",
    "compute_s", "wait_s", "exchange_s", "data_s", "bytes", "left_out", "warmup",
}  # fmt: skip


def made_up(world: World) -> Transport:
    about = {"world": world, "name": "made up", "bytes_sent": 0, "on_failure": lambda call: None}
    return cast(Transport, SimpleNamespace(now=lambda: module.time.perf_counter(), **about))


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    """Of worker 1 of 4; nothing is written before the end, however slow the machine is."""
    monkeypatch.setattr(module, "FOLD_S", float("inf"))
    world = World(1, 4, hosts=("alpha", "beta", "gamma", "delta"))
    journal = EventLog(tmp_path, 1)
    yield Monitor(journal, made_up(world))
    journal.close()


@pytest.fixture
def events(tmp_path: Path) -> Events:
    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "rank-001.jsonl").read_text().splitlines()]

    return read


def exchange(watch: Monitor) -> None:
    watch.stepped(1, 32, 32)
    watch.begin()
    watch.end(Timing(), None, block=1, warmup=False)


def test_delays_are_counted_and_not_listed(watch: Monitor, events: Events) -> None:
    for delay in (3, 0, 3, 11, 3):
        watch.pushed(delay)
        exchange(watch)
    watch.refused(2)
    watch.refused()
    watch.close(5)
    line = events()[0]
    assert set(line) == SYNCHRONOUS | {"delays", "refused"}
    assert list(line["delays"].items()) == [("0", 1), ("3", 3), ("11", 1)]
    assert line["refused"] == 3
    assert line["exchanges"] == 5


def test_each_push_stands_on_one_line(watch: Monitor, events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLD_S", 0.0)
    watch.pushed(1)
    exchange(watch)
    exchange(watch)
    watch.pushed(4)
    watch.pushed(4)
    exchange(watch)
    watch.close(3)
    assert [line.get("delays") for line in events()[:3]] == [{"1": 1}, None, {"4": 2}]


def test_threads_may_push_while_lines_are_written(
    watch: Monitor, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLD_S", 0.0)

    def push() -> None:
        for _ in range(2000):
            watch.pushed(1)

    threads = [threading.Thread(target=push) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        exchange(watch)
    for thread in threads:
        thread.join()
    watch.close(1)
    assert sum(line.get("delays", {}).get("1", 0) for line in events()) == 6000


def test_who_was_lost_and_who_takes_over(watch: Monitor, events: Events, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        watch.lost(2, "no word for 30 s", [1])
        watch.takeover(2, 812)
    lost, takeover = events()  # at once, not with the next line
    assert {k: lost[k] for k in ("kind", "rank", "rank_lost", "why", "taken_over")} == {
        "kind": "lost", "rank": 1, "rank_lost": 2, "why": "no word for 30 s", "taken_over": [1],
    }  # fmt: skip
    assert {k: takeover[k] for k in ("kind", "rank", "slice_of", "version", "from")} == {
        "kind": "takeover", "rank": 1, "slice_of": 2, "version": 812, "from": "replica",
    }  # fmt: skip
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.messages == [
        "rank 2 on gamma is lost: no word for 30 s; its slices go to rank 1 on beta; the others go on",
        "rank 1 on beta takes over the slices of rank 2 on gamma at version 812",
    ]


# -- data -------------------------------------------------------------------------------------------------------------
class Clock:
    """Stands still until somebody moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make(tmp_path: Path, size: int) -> Monitor:
    world = World(min(1, size - 1), size, hosts=("alpha",) * size)
    return Monitor(EventLog(tmp_path, 1), made_up(world))


def times(line: dict[str, Any]) -> tuple[float, float, float, float]:
    return line["compute_s"], line["data_s"], line["wait_s"], line["exchange_s"]


def test_the_time_is_cut_into_four_without_rest(tmp_path: Path, events: Events, clock: Clock) -> None:
    watch = make(tmp_path, 4)
    for _ in range(2):
        clock.now += 3  # for a batch
        watch.waited(3)
        clock.now += 5
        watch.stepped(1, 32, 32)
        watch.begin()
        clock.now += 2 + 1
        watch.end(Timing(2), None, block=1, warmup=False)
    clock.now += 4  # the last look whether there is more
    watch.waited(4)
    watch.close(2)
    first, second, last, _ = events()
    assert times(first) == times(second) == (5, 3, 2, 1)
    assert times(last) == (0, 4, 0, 0)


def test_alone_the_wait_is_no_computing(tmp_path: Path, events: Events, clock: Clock) -> None:
    watch = make(tmp_path, 1)
    clock.now += 3
    watch.waited(3)
    clock.now += 5
    watch.stepped(1, 32, 32)
    clock.now += 0.125
    watch.waited(0.125)
    watch.stepped(2, 64, 32)
    watch.close(0)
    first, last, _ = events()
    assert times(first) == (5, 3, 0, 0)
    assert times(last) == (0, 0.125, 0, 0)


def test_a_thread_that_fetches_ahead_keeps_nobody_waiting(tmp_path: Path, events: Events, clock: Clock) -> None:
    watch = make(tmp_path, 4)
    clock.now += 1
    exchange(watch)
    clock.now += 10
    thread = threading.Thread(target=watch.waited, args=(9,))
    thread.start()
    thread.join()
    watch.waited(2)
    exchange(watch)
    watch.close(2)
    assert [times(line)[:2] for line in events()[:2]] == [(1, 0), (8, 2)]
