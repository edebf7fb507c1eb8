# SPDX-License-Identifier: Apache-2.0
"""Between a run and its sinks: training never waits, errors and drops are reported once, values keep their order."""

from __future__ import annotations

import logging
import threading

import pytest

from paceline.core.world import World
from paceline.observe.sinks.async_writer import AsyncWriter
from paceline.observe.sinks.base import Values
from paceline.observe.sinks.dispatcher import Dispatcher


class Kept:
    """A sink that keeps what it gets; it can be held up, and made to fail."""

    def __init__(self, fails: bool = False, held: bool = False) -> None:
        self.got: list[tuple[int, Values]] = []
        self.fails, self.closed = fails, False
        self.taken, self.free = threading.Event(), threading.Event()
        if not held:
            self.free.set()

    def log(self, values: Values, step: int) -> None:
        self.taken.set()
        self.free.wait()
        if self.fails:
            raise RuntimeError("the disk is full")
        self.got.append((step, values))

    def close(self) -> None:
        self.closed = True


def made_writer(sink: Kept, queue_size: int = 8) -> AsyncWriter:
    return AsyncWriter(sink, "Kept", World(1, 4, host="alpha").sign, queue_size)


def test_values_come_in_order_and_all_before_the_close() -> None:
    sink = Kept()
    writer = made_writer(sink, 200)
    for step in range(100):
        writer.offer({"loss": float(step)}, step)
    writer.close()
    assert sink.got == [(step, {"loss": float(step)}) for step in range(100)] and sink.closed


def test_a_slow_sink_stalls_nobody_and_drops_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    sink = Kept(held=True)
    writer = made_writer(sink, 3)
    writer.offer({}, 0)
    assert sink.taken.wait(30)  # one is in its hands, and three find room
    with caplog.at_level(logging.WARNING, "paceline"):
        for step in range(1, 11):
            writer.offer({}, step)
        assert writer.dropped == 7
        sink.free.set()
        writer.close()
    assert [step for step, _ in sink.got] == [0, 1, 2, 3]
    first, last = caplog.messages
    assert first.startswith("the sink Kept is too slow: 3 calls") and first.endswith("[rank 1 of 4 on alpha]")
    assert "did not get 7 call(s), which were dropped, and failed at 0" in last


def test_a_sink_that_never_answers_does_not_keep_the_end(caplog: pytest.LogCaptureFixture) -> None:
    sink = Kept(held=True)
    writer = made_writer(sink)
    writer.offer({}, 0)
    writer.offer({}, 1)
    assert sink.taken.wait(30)
    with caplog.at_level(logging.WARNING, "paceline"):
        writer.close(timeout_s=0.01)
    assert writer.dropped == 2 and "did not get 2 call(s)" in caplog.text
    sink.free.set()


def test_an_error_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    writer = made_writer(Kept(fails=True))
    with caplog.at_level(logging.WARNING, "paceline"):
        for step in range(5):
            writer.offer({"loss": 1.0}, step)
        writer.close()
    assert writer.failed == 5
    first, last = caplog.messages
    assert "failed and is tried again: RuntimeError: the disk is full" in first and "failed at 5" in last


def test_the_first_worker_alone_by_default_and_whoever_it_is_now() -> None:
    world, sink, other = World(0, 3), Kept(), Kept()
    dispatcher = Dispatcher(
        lambda: world, lambda block: {"block": float(block), "minibatches": 4.0}, lambda: {"lr": 0.5}
    )
    dispatcher.add_sink(sink, World().sign, 0.0, False)
    dispatcher.add_sink(other, World().sign, 0.0, True)
    dispatcher.log({"loss": 2.0}, 3)
    dispatcher.progress(1, 4)
    world = World(1, 3)
    dispatcher.log({"loss": 1.0}, 5)
    dispatcher.close()
    assert [step for step, _ in sink.got] == [3, 4] and [step for step, _ in other.got] == [3, 4, 5]
    own = sink.got[1][1]
    rate = own.pop("paceline/minibatches_per_s")
    assert own == {"paceline/block": 1.0, "paceline/minibatches": 4.0, "paceline/lr": 0.5} and rate == 0.0
