# SPDX-License-Identifier: Apache-2.0
"""Words inside lines get their places exactly, whatever the prices that help the search."""

from __future__ import annotations

import numpy as np
import pytest
from _sources import made_up
from scipy.optimize import linear_sum_assignment

from paceline_lightrnn.allocation.inside import SMALL, cheapest_places, settle


@pytest.mark.parametrize(("words", "places"), [(1, 1), (4, 4), (3, 7), (SMALL + 2, SMALL + 2), (SMALL, SMALL + 9)])
@pytest.mark.parametrize("high", [0.0, 30.0])
def test_it_is_the_exact_assignment(words: int, places: int, high: float) -> None:
    cost = made_up(words, places, 1, seed=4).row
    prices = np.random.default_rng(2).random(places) * high
    found = cheapest_places(cost, prices)
    assert len(set(found.tolist())) == words
    best = cost[linear_sum_assignment(cost)].sum(dtype=np.float64)
    np.testing.assert_allclose(cost[np.arange(words), found].sum(dtype=np.float64), best, rtol=1e-6)


def test_nobody_and_equal_costs() -> None:
    assert len(cheapest_places(np.empty((0, 3), np.float32), np.zeros(3))) == 0
    assert sorted(cheapest_places(np.ones((SMALL + 1, SMALL + 1), np.float32), np.zeros(SMALL + 1))) == list(
        range(SMALL + 1)
    )


def test_every_line_for_itself() -> None:
    costs = made_up(20, 1, 6)
    line = np.array([0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 3, 3, 3, 3, 3])
    done: list[int] = []
    place = settle(costs.column_costs, line, 5, 6, np.zeros(6), "column", done.append)
    assert done == [1, 2, 3, 4, 5]
    for k in range(5):
        words = np.flatnonzero(line == k)
        assert place[words].tolist() == cheapest_places(costs.column[words], np.zeros(6)).tolist()
