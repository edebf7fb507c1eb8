# SPDX-License-Identifier: Apache-2.0
"""What is timed on one worker, and what all come to from it, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.forecast.sim import Clock
from paceline.rules.schedule import Pace, Paced
from paceline.tuning import period_controller as timed
from paceline.tuning.period_controller import AGAIN, FIRST, PeriodController, SimulatedTimer, WallTimer


class Said:
    """A stopwatch that says what it is told to."""

    def __init__(self, found: tuple[float, float] | None = (0.1, 0.2)) -> None:
        self.found, self.restarts = found, 0

    def stepped(self, blocks: int, steps: int) -> None:
        """Nothing."""

    def measured(self) -> tuple[float, float] | None:
        return self.found

    def restart(self) -> None:
        self.restarts += 1


HALF = Paced(4, pace=Pace(share=0.5, least=1, longest=64))
"""tau* = e / c."""


def test_the_slowest_link_and_the_usual_step_decide() -> None:
    """e = 6 s of the second worker, c = 2 s of the third: three minibatches."""
    rows: list[Any] = [[True, 1.0, 1.0], [False, 6.0, 9.0], [True, 2.0, 2.0], None]
    assert PeriodController(Said()).agree(rows, HALF, 8) == ({"period": 3}, "an exchange takes 6 s, a step 2 s")


def test_who_looks_when() -> None:
    timer = Said(None)
    controller = PeriodController(timer)
    controller.stepped(FIRST, 100)
    assert not controller.due and controller.measurements() is None
    timer.found = (0.1, 0.2)
    controller.stepped(FIRST - 1, 100)
    assert not controller.due and controller.measurements() == (False, 0.1, 0.2)
    assert controller.agree([controller.measurements()], HALF, FIRST - 1) is None, "nobody is due"
    controller.stepped(FIRST, 104)
    assert controller.due and controller.measurements() == (True, 0.1, 0.2)
    assert controller.agree([controller.measurements()], HALF, FIRST) == (
        {"period": 1},
        "an exchange takes 100 ms, a step 200 ms",
    )
    assert not controller.due and timer.restarts == 1
    controller.stepped(FIRST + AGAIN - 1, 900)
    assert not controller.due
    controller.stepped(FIRST + AGAIN, 904)
    assert controller.due
    controller.held = True
    assert not controller.due and controller.agree([[True, 9.0, 0.1]], HALF, FIRST + AGAIN) is None


def test_after_a_resume_looks_come_where_they_would_have_come() -> None:
    first, second, other = (PeriodController(Said()) for _ in range(3))
    first.agree([[True, 5.0, 1.0]], HALF, 8)
    first.held = True
    second.load(first.state())
    assert second.state() == first.state() == {"next": 8 + AGAIN, "settled": True, "held": True}
    first.held = False
    other.load(first.state())
    other.stepped(20, 100)
    assert not other.due
    other.renew()  # other workers
    assert other.due and other.measurements() == (True, 0.1, 0.2)


def test_the_clock_on_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 minibatches of 2 s, 1 s of waiting and an exchange of 3 s, but for one that took longer."""
    now, spent = [100.0], [0.0, 0.0]
    monkeypatch.setattr(timed.time, "perf_counter", lambda: now[0])
    watch = WallTimer(spent)
    assert watch.measured() is None

    def block(number: int, minibatch_s: float = 2.0, exchange_s: float = 3.0) -> None:
        for step in range(4):
            now[0] += minibatch_s
            if step == 3:
                now[0] += 1.0 + exchange_s
                spent[0] += 1.0
                spent[1] += exchange_s
            watch.stepped(number + step // 3, 4 * number + step + 1)

    block(0, 50.0, 50.0)  # of which the first step is before the stopwatch begins
    block(1, 70.0, 70.0)
    for number in range(2, 5):
        block(number)
    assert watch.measured() is None, "three blocks are too few"
    block(5, 9.0, 9.0)
    assert watch.measured() == (3.0, 2.0)
    for number in range(6, 10):
        block(number, 4.0, 5.0)
    assert watch.measured() == (5.0, 4.0)
    watch.restart()
    assert watch.measured() is None
    for number in range(10, 15):
        block(number)
    assert watch.measured() is None, "the first two do not count"
    block(15)
    assert watch.measured() == (3.0, 2.0)


@pytest.mark.parametrize(
    ("overlap", "fragments", "exposed_s"), [(0, 2, 8.0), (1, 1, 7.0), (1, 2, 6.0), (3, 2, 2.0), (4, 2, 0.0)]
)
def test_what_steps_hide_does_not_count(overlap: int, fragments: int, exposed_s: float) -> None:
    """Two messages of 4 s, in as many fragments, behind so many minibatches of a second."""
    watch = SimulatedTimer(Clock(network=4.0), Paced(4, 0, fragments, overlap), 0, 2, 1000)
    watch.stepped(1, 4)
    assert watch.measured() == (exposed_s, 1.0)
