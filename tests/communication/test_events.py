# SPDX-License-Identifier: Apache-2.0
"""The simulated clock: what happens when, and that the seed alone decides."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.forecast.sim import Clock, exponential, uniform


def play(clock: Clock) -> list[tuple[float, Any]]:
    """Let all that is due happen; (time, what `note` was given)."""
    seen: list[tuple[float, Any]] = []
    clock.seen = seen  # type: ignore[attr-defined]
    while clock.step():
        pass
    return seen


def note(clock: Clock, what: Any) -> Any:
    return lambda: clock.seen.append((clock.now, what))  # type: ignore[attr-defined]


def test_things_happen_in_the_order_of_their_time() -> None:
    clock = Clock()
    for rank, after in ((0, 3.0), (1, 1.0), (2, 2.0)):
        clock.wake(rank, after, note(clock, rank))
    assert play(clock) == [(1.0, 1), (2.0, 2), (3.0, 0)]
    assert not clock.step()


def test_at_one_instant_messages_come_first_and_lower_ranks_before_higher() -> None:
    clock = Clock(network=1.0)
    for rank in (2, 0, 1):
        clock.wake(rank, 1.0, note(clock, f"worker {rank}"))
        clock.carry(rank, 5, 0, note(clock, f"from {rank}"))
    said = [what for _, what in play(clock)]
    assert said == ["from 0", "from 1", "from 2", "worker 0", "worker 1", "worker 2"]


def test_what_a_thing_causes_now_happens_now() -> None:
    """Before the next worker wakes at the same instant."""
    clock = Clock()

    def push() -> None:
        note(clock, "push")()
        clock.carry(0, 1, 8, lambda: clock.carry(1, 0, 8, note(clock, "answer")))

    clock.wake(0, 1.0, push)
    clock.wake(1, 1.0, note(clock, "worker 1"))
    assert [what for _, what in play(clock)] == ["push", "answer", "worker 1"]


def test_messages_of_one_pair_keep_their_order_under_random_latencies() -> None:
    clock = Clock(network=lambda source, to, nbytes, generator: generator.expovariate(1.0), seed=3)
    for number in range(2000):
        pair = number % 3
        clock.wake(pair, number * 0.1, lambda n=number, p=pair: clock.carry(p, 9, 0, note(clock, (p, n))))
    seen = play(clock)
    assert [at for at, _ in seen] == sorted(at for at, _ in seen)
    for pair in range(3):
        assert [n for _, (p, n) in seen if p == pair] == list(range(pair, 2000, 3))
    numbers = [n for _, (_, n) in seen]
    assert numbers != sorted(numbers), "messages of different pairs overtake each other"


@pytest.mark.parametrize("compute", [exponential(2.0), uniform(1.0, 3.0)])
def test_the_seed_alone_decides(compute: Any) -> None:
    """Not the order in which the program asks."""
    keys = [(rank, step) for rank in range(5) for step in range(40)]
    one = {key: Clock(compute, seed=1).compute_s(*key) for key in keys}
    clock = Clock(compute, seed=1)
    assert {key: clock.compute_s(*key) for key in random.Random(0).sample(keys, len(keys))} == one
    other = {key: Clock(compute, seed=2).compute_s(*key) for key in keys}
    assert all(one[key] != other[key] for key in keys)
    assert len(set(one.values())) == len(keys)


def test_the_state_between_two_events_is_all_that_later_ones_need() -> None:
    def go(clock: Clock) -> list[tuple[float, Any]]:
        for number in range(20):
            clock.carry(number % 2, 2, 0, note(clock, number))
        return play(clock)

    def network(source: int, to: int, nbytes: int, generator: random.Random) -> float:
        return generator.random()

    first = Clock(network=network, seed=4)
    go(first)
    second = Clock(network=network, seed=4)
    second.load(first.state())
    assert go(first) == go(second)
    assert go(Clock(network=network, seed=4)) != go(second)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_durations_that_cannot_be(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"minibatch 4 of worker 1 takes .* finite and not negative"):
        Clock(compute=seconds).compute_s(1, 4)
    with pytest.raises(ValueError, match="a message from 0 to 1 takes"):
        Clock(network=lambda *about: seconds).carry(0, 1, 8, lambda: None)
