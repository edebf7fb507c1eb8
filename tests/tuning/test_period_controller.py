# SPDX-License-Identifier: Apache-2.0
"""What is timed on one worker, and what all come to from it, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.forecast.sim import Clock
from paceline.rules.schedule import Pace, Paced
from paceline.tuning.period_controller import LASTS_S, LEAST, PeriodController, SimulatedTimer, WallTimer

HALF = Paced(4, pace=Pace(share=0.5, least=1, longest=64))
"""tau* = e / c."""


class Given:
    """Measures what it is given; a block takes a second."""

    def __init__(self, exchange_s: float = 0.1) -> None:
        self.times: tuple[float, float] | None = (exchange_s, 0.2)
        self.now_s = 0.0

    def stepped(self, blocks: int, steps: int) -> tuple[float, float] | None:
        self.now_s += 1.0
        return self.times

    def now(self) -> float:
        return self.now_s

    def restart(self) -> None:
        """Nothing."""


def go(controller: PeriodController, seconds: int) -> list[bool]:
    """Whether a look was due after each block."""
    due = []
    for _ in range(seconds):
        controller.stepped(1, 4)
        due.append(bool(controller.due))
    return due


def test_the_slowest_link_and_the_usual_step_decide() -> None:
    """e = 6 s of the second worker, c = 2 s of the third: three minibatches, which are nearest to four."""
    rows: list[Any] = [["times", 1.0, 1.0, None], ["", 6.0, 9.0, None], ["", 2.0, 2.0, 900], None]
    why = "an exchange takes 6 s beside 2 s of computing"
    assert PeriodController(Given()).agree(rows, HALF) == ({"period": 4}, why)
    rows[2][3] = 30
    assert PeriodController(Given()).agree(rows, HALF) == ({"period": 1}, f"{why}, and a pass has 30 minibatches")


def test_without_a_probe_it_looks_at_the_first_blocks_and_at_the_first_pass() -> None:
    length: list[int | None] = [None]
    controller = PeriodController(Given(), lambda: length[0])
    assert not controller.due and controller.measurements() == ["", None, None, None]
    assert go(controller, 1) == [True]
    assert controller.agree([controller.measurements()], HALF) is not None
    assert go(controller, 3) == [False] * 3
    length[0] = 100
    assert controller.due and controller.measurements() == ["length", 0.1, 0.2, 100]
    assert controller.agree([["", 0.1, 0.2, 100]], HALF) is None, "no worker's look is due"
    longer = Paced(4, pace=HALF.pace)
    assert controller.agree([controller.measurements()], longer) == ({"period": 1}, "a pass has 100 minibatches")
    assert not controller.due
    controller.held = True
    assert controller.agree([["times", 9.0, 0.1, 5]], HALF) is None


@pytest.mark.parametrize(("factor", "again"), [(1.0, 0), (2.9, 0), (0.35, 0), (3.1, 1), (0.3, 1)])
def test_it_chooses_again_where_exchanges_take_three_times_as_long_for_a_minute(factor: float, again: int) -> None:
    timer = Given()
    controller = PeriodController(timer, probed=True, overlaps=True)
    minute = int(LASTS_S)
    assert not any(go(controller, minute + 5))
    timer.times = (0.1 * factor, 0.2)
    assert go(controller, minute + 1) == [False] * minute + [bool(again)]
    found = controller.agree([["times", 6.0, 1.0, None]], Paced(4, overlap=2))
    assert found is not None and found[0] == {"period": 8, "overlap": 8}
    assert not any(go(controller, 2 * minute)), "this is usual now"


def test_a_slow_minute_with_one_usual_exchange_in_it_is_noise() -> None:
    timer = Given()
    controller = PeriodController(timer, probed=True)
    go(controller, 70)
    for _ in range(3):
        timer.times = (9.0, 0.2)
        assert not any(go(controller, int(LASTS_S) - 1))
        timer.times = (0.1, 0.2)
        assert not any(go(controller, 1))


def test_a_resume_goes_on_with_what_is_usual() -> None:
    first, second = PeriodController(Given()), PeriodController(Given())
    go(first, 3)
    first.held = True
    second.load(first.state())
    assert second.state() == first.state() == {"usual": 0.1, "settled": False, "fitted": False, "held": True}
    second.load({"next": 72, "settled": True, "held": False})  # of an older checkpoint
    assert not second.due


def test_the_clock_on_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 minibatches of 2 s, 1 s of waiting, 3 s of an exchange that takes 5, and one that takes longer."""
    now, spent = [100.0], [0.0, 0.0, 0.0]
    watch = WallTimer(spent)
    monkeypatch.setattr(watch, "now", lambda: now[0])
    found: list[Any] = []

    def block(number: int, minibatch_s: float = 2.0, exchange_s: float = 3.0, took_s: float = 5.0) -> None:
        for step in range(4):
            now[0] += minibatch_s
            if step == 3:
                now[0] += 1.0 + exchange_s
                for k, seconds in enumerate((1.0, exchange_s, took_s)):
                    spent[k] += seconds
            found.append(watch.stepped(number + step // 3, 4 * number + step + 1))

    for number in range(2):
        block(number, 50.0, 50.0, 0.1)  # the first ones do not count
    for number in range(2, 1 + LEAST):
        block(number)
    assert found == [None] * len(found), "one block is missing"
    block(1 + LEAST, 9.0, 9.0, 9.0)
    assert found[-1] == pytest.approx((5.0, 2.0))
    block(2 + LEAST)
    watch.restart()
    for number in range(11, 14 + LEAST):
        block(number)
    assert [one for one in found[-4 * (LEAST + 4) :] if one] == [pytest.approx((5.0, 2.0))]


def test_the_simulated_clock() -> None:
    """Two messages of 4 s."""
    watch = SimulatedTimer(Clock(network=4.0), 0, 2, 1000)
    assert watch.stepped(1, 4) is None and watch.stepped(8, 32) == (8.0, 1.0)
    assert watch.now() == 2.0
