# SPDX-License-Identifier: Apache-2.0
"""The smoothed dual: its gradient, its limit, and prices that spread the words."""

from __future__ import annotations

import numpy as np
from _sources import made_up

from paceline_lightrnn.allocation.candidates import Candidates, dense, dual_bound, sparse
from paceline_lightrnn.allocation.prices import anneal, smoothed, solve_prices


def some(words: int = 40, lines: int = 5) -> Candidates:
    return dense(made_up(words, lines, 1).row_costs, np.arange(words), lines, "row")


def test_the_gradient_is_the_slope() -> None:
    candidates, temperature, step = some(), 0.7, 1e-2
    prices = np.linspace(0, 2, 5)
    _, load = smoothed(candidates, prices, temperature)
    np.testing.assert_allclose(load.sum(), 40, rtol=1e-5)
    for i in range(5):
        to = step * (np.arange(5) == i)
        slope = smoothed(candidates, prices + to, temperature)[0] - smoothed(candidates, prices - to, temperature)[0]
        np.testing.assert_allclose(slope / (2 * step), load[i], rtol=2e-2)


def test_cold_it_is_the_minimum() -> None:
    candidates, prices = some(), np.linspace(0, 2, 5)
    value, _ = smoothed(candidates, prices, 1e-5)
    np.testing.assert_allclose(value, (candidates.cost + prices).min(1).sum(), rtol=1e-4)


def test_all_lines_as_candidates_are_no_candidates_at_all() -> None:
    costs = made_up(40, 5, 1)
    listed = sparse(costs.row_costs, 40, 5, "row", np.zeros(5), 5)
    for mine, theirs in zip(smoothed(listed, np.arange(5.0), 0.5), smoothed(some(), np.arange(5.0), 0.5), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_words_are_spread_evenly_and_the_bound_is_tight() -> None:
    costs = made_up(2000, 20, 1)
    candidates = dense(costs.row_costs, np.arange(2000), 20, "row")
    levels: list[int] = []
    prices = solve_prices(candidates, 100, None, anneal(candidates), levels.append)
    assert levels == list(range(1, 8))
    assert prices.min() >= 0
    load = np.bincount((candidates.cost + prices).argmin(1), minlength=20)
    assert abs(load - 100).max() <= 5
    bound = dual_bound(costs.row_costs, 2000, 20, 100, prices, "row")
    assert bound > dual_bound(costs.row_costs, 2000, 20, 100, np.zeros(20), "row")


def test_lines_with_room_to_spare_are_free() -> None:
    """Twice the room that is needed: no price where there is room left."""
    candidates = some(200, 4)
    prices = solve_prices(candidates, 100, None, anneal(candidates))
    load = np.bincount((candidates.cost + prices).argmin(1), minlength=4)
    assert (prices[load < 95] < 0.05).all()
    assert (load <= 105).all()
