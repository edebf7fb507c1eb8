# SPDX-License-Identifier: Apache-2.0
"""Which changes a bound keeps, from hand-made curves: what costs nothing, what costs 3 %, and noise."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable

import pytest

from paceline.tuning.loss_bound import SETTLE, LossBound, Place
from paceline.tuning.loss_curve import Excess

EVERY, WORKERS = 64, 4
START = 8_000
"""Minibatches before the first held-out loss, so that a doubling holds many of them."""


class Made:
    """A run whose held-out loss is 5 M^-0.2, times 1 + the cost of its setting; it does what the bound says.

    Args:
        bound: decides.
        cost: (period, workers) -> a share.
        target: period that is wanted.
        noise: standard deviation of ln L.
        rate: M -> the learning rate.
        grows: whether workers may join.
    """

    def __init__(
        self,
        bound: LossBound,
        cost: Callable[[int, int], float],
        target: int = 8,
        noise: float = 0.0,
        rate: Callable[[int], float] = lambda made: 0.1,
        grows: bool = False,
        seed: int = 0,
    ) -> None:
        self.bound, self.cost, self.target, self.noise = bound, cost, target, noise
        self.rate, self.grows, self.random = rate, grows, random.Random(seed)
        self.period, self.workers, self.made = 4, WORKERS, START
        self.periods: list[int] = []

    def go(self, until: int) -> Made:
        """Train on."""
        while self.made < until:
            self.made += EVERY
            lift = self.cost(self.period, self.workers) + self.random.gauss(0.0, self.noise)
            row = (self.made, 5.0 * self.made**-0.2 * math.exp(lift), self.rate(self.made))
            place = Place(self.made, self.period, self.target, self.workers, self.grows)
            found = self.bound.look(place, [row])
            if found is not None:
                self.period = found[0]
                self.periods.append(self.period)
            if self.grows and self.bound.may_grow:
                self.workers *= 2
                self.bound.among(self.workers)
        return self

    @property
    def events(self) -> list[str]:
        return [str(facts["event"]) for _, facts in self.bound.told]


def free(period: int, workers: int) -> float:
    return 0.0


def dear(period: int, workers: int) -> float:
    return 0.03 * (period > 4)


# -- curves without noise ----------------------------------------------------------------------------------------------


def test_what_costs_nothing_is_kept() -> None:
    made = Made(LossBound(0.01), free, target=12).go(60_000)
    assert made.periods == [8, 12]
    assert made.events == ["tried", "kept"] * 2 and made.bound.spent == pytest.approx(0.0, abs=1e-6)
    assert made.bound.blocked == ""


def test_what_costs_three_percent_is_withdrawn_and_tried_again_after_twice_the_samples() -> None:
    made = Made(LossBound(0.01), dear).go(30_000)
    first, second = (text for text, facts in made.bound.told if facts["event"] == "tried")
    assert made.periods[:3] == [8, 4, 8] and made.period == 4
    assert 0 < made.bound.spent < 2 * 0.03 / 3  # for a third of the samples, at most, each time
    assert made.events[:4] == ["tried", "withdrawn"] * 2
    assert "period 4 -> 8 is withdrawn: the held-out loss is 3 %" in made.bound.told[1][0]
    assert "had to be withdrawn" in made.bound.blocked and first != second


def test_a_change_may_cost_half_of_what_is_left_and_the_last_one_all() -> None:
    costs = {4: 0.0, 8: 0.004, 16: 0.0095}
    made = Made(LossBound(0.01), lambda period, _: costs[period], target=16).go(80_000)
    assert made.periods == [8, 16] and made.bound.spent == pytest.approx(0.0095, abs=1e-4)
    half = Made(LossBound(0.01), lambda period, _: costs[period], target=32, seed=1).go(80_000)
    assert half.periods[:3] == [8, 16, 8] and 0.004 < half.bound.spent < 0.007  # and what 16 cost for a while


def test_what_is_spent_is_never_more_than_the_bound() -> None:
    made = Made(LossBound(0.01), lambda period, _: 0.0025 * math.log2(period / 4), target=4096).go(2_000_000)
    assert made.bound.spent <= 0.012 and 8 <= made.period < 128


def test_a_shorter_period_needs_no_trial() -> None:
    made = Made(LossBound(0.01), free, target=16).go(60_000)
    assert made.period == 16
    made.target = 8
    made.go(made.made + EVERY)
    assert made.period == 8 and made.events == ["tried", "kept"] * 2


# -- workers -----------------------------------------------------------------------------------------------------------


def test_workers_join_while_they_cost_nothing() -> None:
    made = Made(LossBound(0.01), free, target=4, grows=True).go(60_000)
    assert made.workers >= 16 and set(made.events) == {"tried", "kept"} and made.periods == []


def test_workers_that_cost_too_much_stay_and_no_more_join() -> None:
    made = Made(LossBound(0.01), lambda _, workers: 0.03 * (workers > WORKERS), target=4, grows=True).go(60_000)
    assert made.workers == 2 * WORKERS and made.events == ["tried", "withdrawn"]
    assert made.bound.spent == pytest.approx(0.03, abs=1e-3)  # and the end says so
    assert "no more join" in made.bound.told[1][0]


def test_a_lost_worker_ends_a_trial() -> None:
    made = Made(LossBound(0.01), free)
    while not made.periods:
        made.go(made.made + EVERY)
    made.workers = WORKERS - 1
    made.bound.among(made.workers)
    made.go(made.made + EVERY)
    assert made.periods == [8, 4]
    assert "the number of workers is 3 now, and was 4" in made.bound.told[-1][0]


# -- where nothing can be decided --------------------------------------------------------------------------------------


def test_while_the_learning_rate_moves_nothing_is_begun() -> None:
    made = Made(LossBound(0.01), free, rate=lambda now: 0.99 ** ((now - START) / EVERY)).go(60_000)
    assert made.periods == [] and "learning rate moves" in made.bound.blocked


def test_a_rate_that_falls_in_a_trial_ends_it() -> None:
    made = Made(LossBound(0.01), free)
    while not made.periods:
        made.go(made.made + EVERY)
    made.rate = lambda now: 0.05
    made.go(made.made + EVERY)
    assert made.periods == [8, 4] and "the learning rate moves" in made.bound.told[-1][0]


def test_a_loss_that_is_no_number_ends_a_trial() -> None:
    made = Made(LossBound(0.01), free)
    while not made.periods:
        made.go(made.made + EVERY)
    place = Place(made.made + EVERY, 8, 8, WORKERS, False)
    assert made.bound.look(place, [(made.made + EVERY, None, 0.1)]) is not None
    assert "not a finite number" in made.bound.told[-1][0]


def test_losses_that_scatter_too_much_are_not_trusted() -> None:
    made = Made(LossBound(0.01), free, noise=0.1).go(60_000)
    assert made.periods == [] and "scatters by" in made.bound.blocked and "log it more often" in made.bound.blocked


def test_a_user_who_sets_the_period_ends_a_trial() -> None:
    made = Made(LossBound(0.01), free)
    while not made.periods:
        made.go(made.made + EVERY)
    made.bound.drop()
    assert made.go(made.made + EVERY).period == 8 and made.events == ["tried"]


# -- noise -------------------------------------------------------------------------------------------------------------


def test_noise_does_not_hide_a_cost_more_often_than_its_error() -> None:
    """Twice the share, in 60 runs: at most a tenth keeps it at some time, where each trial may err in 5 %."""
    share = 0.01  # of the last change: all of the bound
    kept = [
        Made(LossBound(share), lambda period, _: 2 * share * (period > 4), noise=0.005, seed=seed).go(24_000).bound.kept
        for seed in range(60)
    ]
    assert sum(kept) <= 6


def test_noise_does_not_hinder_what_costs_nothing() -> None:
    kept = [Made(LossBound(0.02), free, noise=0.003, seed=seed).go(24_000).bound.kept for seed in range(20)]
    assert sum(kept) >= 14


# -- branches ----------------------------------------------------------------------------------------------------------


def test_branches_are_kept_by_their_most() -> None:
    bound, now = LossBound(0.01), Place(1000, 4, 16, WORKERS, False)
    assert bound.branch(now) == (8, 0.005)
    assert not bound.branched(now, 8, 0.005, Excess(0.004, 0.002)) and bound.branch(now) is None
    later = Place(2000, 4, 16, WORKERS, False)
    assert bound.branch(later) == (8, 0.005)
    assert bound.branched(later, 8, 0.005, Excess(0.003, 0.001)) and bound.spent == pytest.approx(0.004)
    assert bound.branch(Place(3000, 8, 16, WORKERS, False)) == (16, pytest.approx(0.006))  # the last one: all the rest
    assert bound.branch(Place(3000, 16, 16, WORKERS, False)) is None


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.003])
@pytest.mark.parametrize("until", [START + 40 * EVERY, 20_000, 30_000])
def test_a_resumed_bound_decides_as_the_one_that_went_on(until: int, noise: float) -> None:
    made = Made(LossBound(0.01), free, target=64, noise=noise, grows=True).go(until)
    other = copy.copy(made)
    other.bound, other.random, other.periods = LossBound(0.01), copy.deepcopy(made.random), list(made.periods)
    other.bound.load(json.loads(json.dumps(made.bound.state())))
    assert other.bound.state() == made.bound.state()
    for one in (made, other):
        one.go(60_000)
    assert (other.period, other.workers, other.periods) == (made.period, made.workers, made.periods)
    assert other.bound.state() == made.bound.state()


def test_blocks_after_a_change_do_not_count() -> None:
    """A transient of 3 % over the first blocks of 8 minibatches is not charged."""
    bound = LossBound(0.01)
    made = Made(bound, free)
    while not made.periods:
        made.go(made.made + EVERY)
    end = made.made + SETTLE * 8 * WORKERS
    made.cost = lambda period, workers: 0.03 * (made.made < end)
    made.go(60_000)
    assert made.periods == [8] and bound.spent == pytest.approx(0.0, abs=1e-3)
