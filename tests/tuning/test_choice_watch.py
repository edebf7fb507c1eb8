# SPDX-License-Identifier: Apache-2.0
"""Whether the network is still what the rule was chosen for, from times made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.rules.choice import ProbeTimes, choose
from paceline.rules.schedule import Paced, Probe
from paceline.tuning.choice_watch import PATIENCE, ChoiceWatch
from paceline.tuning.watch_timers import BLOCKS, EVERY, SKIPPED, STEPS, WallBlocksWatch, WallStepsWatch, Window


class Said:
    """A timer whose every step ends a window."""

    samples = False

    def __init__(self) -> None:
        self.found: Window | None = None

    def stepped(self, blocks: int, steps: int) -> Window | None:
        return self.found


def watch(lockstep: bool = False, patience: int = PATIENCE, share: float = 0.02) -> tuple[ChoiceWatch, Said]:
    timer = Said()
    return ChoiceWatch(timer, lockstep, share, patience), timer


def windows(one: ChoiceWatch, timer: Said, *found: Window | None) -> list[bool]:
    """Whether it asks after each window."""
    asks = []
    for timer.found in found:
        one.stepped(0, 0)
        asks.append(one.due)
    return asks


# -- one worker --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_blocks_ask_after_two_windows_in_a_row_with_another_ratio(slower: float) -> None:
    """An exchange of 4 s beside a minibatch of 1 s, on computers that may be slower: 6 counts, and 2.6."""
    same, more, most, less, least = ((e * slower, slower) for e in (4.0, 5.9, 6.0, 2.7, 2.6))
    for odd in (most, least):
        assert windows(*watch(), (4.0, 1.0), odd, same, odd, odd) == [False, False, False, False, True]
    for usual in (more, less):
        assert not any(windows(*watch(), (4.0, 1.0), *[usual] * 9))
    assert windows(*watch(patience=4), (4.0, 1.0), most, most, most, most) == [False] * 4 + [True]


def test_synchronous_steps_ask_at_twice_the_limit() -> None:
    """A fifth of the time: 2.5 s beside 10 are the limit."""
    for seconds, asks in ((4.9, False), (5.1, True)):
        assert windows(*watch(True, share=0.2), *[(seconds, 10.0)] * 2) == [False, asks]
    assert not any(windows(*watch(True, share=0.2), *[(9.0, 10.0), (4.0, 10.0)] * 9)), "not in a row"


def test_no_window_no_answer() -> None:
    one, timer = watch()
    assert windows(one, timer, None, None) == [False, False] and one.said() is None and one.agree([None, None]) is None


def test_noise_of_a_fifth_never_asks() -> None:
    noise = [(4.0 * (1 + 0.2 * ((7 * k) % 11 - 5) / 5), 1.0 + 0.2 * ((3 * k) % 7 - 3) / 3) for k in range(200)]
    asks = windows(*watch(), (4.0, 1.0), *noise)
    assert not any(asks)


# -- all together ------------------------------------------------------------------------------------------------------


def test_the_least_exchange_and_the_usual_step_decide() -> None:
    """One worker alone waits for others: its exchanges say nothing of the network."""
    one, timer = watch()
    windows(one, timer, (4.0, 1.0), (40.0, 1.0), (40.0, 1.0))
    assert one.due and one.said() == [True, 40.0, 1.0, 4.0, 1.0]
    assert one.agree([one.said(), [False, 4.1, 1.0, 4.0, 1.0], None]) is None
    assert not one.due, "it asks again after two more windows"
    assert windows(one, timer, (40.0, 1.0), (40.0, 1.0)) == [False, True]
    moved = one.agree([one.said(), [False, 12.0, 1.0, 4.0, 1.0], [False, 13.0, 3.0, 4.0, 1.0]])
    assert moved is not None and (moved.exchange, moved.step) == (3.0, 1.0)
    assert moved.why == "an exchange takes 3 times as long as after the last choice"


def test_the_worst_exchange_of_synchronous_steps_decides() -> None:
    one, timer = watch(True, share=0.2)
    windows(one, timer, (1.0, 10.0), (1.0, 10.0))
    assert one.agree([[True, 1.0, 10.0, 1.0, 10.0]] * 2) is None
    moved = one.agree([[True, 6.0, 10.0, 1.0, 10.0], [False, 1.0, 10.0, 1.0, 10.0]])
    assert moved is not None and moved.why.startswith("exchanging gradients keeps a worker for 6 s beside 10 s")


def test_nobody_asks_nothing_happens() -> None:
    one, timer = watch()
    windows(one, timer, (4.0, 1.0), (40.0, 1.0))
    assert one.agree([one.said(), [False, 40.0, 1.0, 4.0, 1.0]]) is None


def test_a_resumed_watch_goes_on() -> None:
    one, timer = watch()
    windows(one, timer, (4.0, 1.0), (8.0, 1.0))
    other, then = watch()
    other.load(one.state())
    assert other.state() == one.state() and other.said() == one.said()
    assert windows(other, then, (8.0, 1.0)) == [True]


# -- what would be chosen ----------------------------------------------------------------------------------------------


def test_scaled_times_of_a_probe() -> None:
    """A second hidden of exchanges of 1.5: with half of the exchange's time nothing is left, with twice 2 s."""
    times = ProbeTimes(2.0, 1.5, 0.5, {"dense": 1.4, "int8": 0.5})
    assert times.scaled(1.0, 1.0) == times
    assert times.scaled(0.5, 1.0) == ProbeTimes(2.0, 0.75, 0.0, {"dense": 0.7, "int8": 0.25})
    assert times.scaled(2.0, 1.0) == ProbeTimes(2.0, 3.0, 2.0, {"dense": 2.8, "int8": 1.0})
    assert times.scaled(1.0, 0.5) == ProbeTimes(1.0, 1.5, 1.0, times.block_s), "a faster computer hides less"
    hopeless = ProbeTimes(3.0, 9.0, None, {"dense": 9.0})
    assert hopeless.scaled(0.25, 1.0).exposed_s == 0.25, "two thirds of a step hide 2 of 2.25 s"


@pytest.mark.parametrize(
    ("exchange", "lockstep", "codec"),
    [(0.01, True, ""), (1.0, False, "dense"), (4.0, False, "bf16"), (9.0, False, "int8")],
)
def test_another_network_means_another_choice(exchange: float, lockstep: bool, codec: str) -> None:
    times = ProbeTimes(0.1, 0.1, 0.05, {"dense": 0.1, "bf16": 0.05, "int8": 0.03})
    found, now = (choose(times.scaled(f, 1.0), Paced(probe=Probe())) for f in (exchange, 1.0))
    assert found is not None and now is not None
    assert (found.lockstep, found.codec) == (lockstep, codec)
    assert found.like(now) == (exchange == 1.0)


# -- the wall clock ----------------------------------------------------------------------------------------------------


def test_synchronous_steps_on_the_wall() -> None:
    """The last third of each 96 steps, 2 s and an exchange of 3; all others take longer."""
    spent = [0.0, 0.0, 0.0]
    timer = WallStepsWatch(spent)
    found: list[Any] = []
    for step in range(1, 2 * EVERY + 1):
        inside = (step - 1) % EVERY >= EVERY - STEPS
        assert timer.samples == inside
        for k, seconds in enumerate((2.0, 70.0, 3.0) if inside else (50.0, 0.0, 50.0)):  # waiting does not count
            spent[k] += seconds
        found.append(timer.stepped(0, step))
    assert found[EVERY - 1] == found[-1] == (3.0, 2.0)
    assert sum(one is not None for one in found) == 2


def test_blocks_on_the_wall() -> None:
    """Blocks of 4 minibatches of 2 s, exchanges under way for 3 s; two at first, and one of two, take longer."""
    spent, flights = [0.0, 0.0, 0.0], [0.0, 0.0]
    timer = WallBlocksWatch(spent, flights)
    found = []
    for step in range(1, 4 * (SKIPPED + 2 * BLOCKS) + 1):
        late = step <= 4 * SKIPPED or (step - 1) // 4 % 2 == 1
        spent[0] += 50.0 if late else 2.0
        if step % 4 == 0:
            flights[0] += 50.0 if late else 3.0
            flights[1] += 1
        found.append((step, timer.stepped(step // 4, step)))
    last = 4 * (SKIPPED + BLOCKS)
    assert [row for row in found if row[1] is not None] == [(last, (3.0, 2.0)), (last + 4 * BLOCKS, (3.0, 2.0))]
