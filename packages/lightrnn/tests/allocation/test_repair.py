# SPDX-License-Identifier: Apache-2.0
"""Shortest paths end at the exact optimum of the transportation problem, from any prices."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from paceline_lightrnn.allocation.candidates import Candidates, dual_bound, sparse
from paceline_lightrnn.allocation.repair import repair, search


def candidates(cost: np.ndarray) -> Candidates:
    return Candidates(cost.astype(np.float32), None, cost.shape[1], np.zeros(len(cost)))


def optimum(cost: np.ndarray, capacity: int) -> float:
    places = np.repeat(cost, capacity, axis=1)
    return float(places[linear_sum_assignment(places)].sum())


def total(cost: np.ndarray, place: np.ndarray) -> float:
    return float(cost[np.arange(len(cost)), place].sum())


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 24), st.integers(1, 6), st.integers(0, 3), st.integers(1, 20), st.integers(0, 10**6))
def test_it_is_the_optimum(words: int, lines: int, spare: int, values: int, seed: int) -> None:
    """Whole numbers, so that there are many ties; prices drawn at random; lines with room to spare."""
    draw = np.random.default_rng(seed)
    cost = draw.integers(0, values, (words, lines)).astype(np.float64)
    capacity = -(-words // lines) + spare
    place, prices, full = repair(candidates(cost), capacity, draw.integers(0, values, lines).astype(np.float64))
    assert len(full) == 0
    assert np.bincount(place, minlength=lines).max() <= capacity
    best = optimum(cost, capacity)
    assert total(cost, place) == best
    bound = dual_bound(lambda some: cost[some].astype(np.float32), words, lines, capacity, prices, "row")
    assert abs(bound - best) <= 1e-4 * max(1.0, best)


def test_solved_by_hand() -> None:
    """Both words want line 0; the one that loses less by going leaves."""
    place, _, _ = repair(candidates(np.array([[0.0, 5.0], [0.0, 3.0]])), 1, np.zeros(2))
    assert place.tolist() == [0, 1]


def test_a_path_of_several_lines() -> None:
    """Word 0 cannot go to line 2, but to line 1, whose word can."""
    far = 100.0
    cost = np.array([[0, 1, far], [0, far, far], [far, 0, 1]])
    place, _, _ = repair(candidates(cost), 1, np.zeros(3))
    assert place.tolist() == [1, 0, 2]


def test_lines_that_no_candidate_relieves_are_named() -> None:
    cost = np.zeros((3, 1), np.float32)
    narrow = Candidates(cost, np.zeros((3, 1), np.int16), 3, np.zeros(3))
    place, _, full = repair(narrow, 1, np.zeros(3))
    assert place.tolist() == [0, 0, 0]
    assert full.tolist() == [0]


def test_few_candidates_under_good_prices_suffice() -> None:
    draw = np.random.default_rng(5)
    cost = draw.random((60, 12)).astype(np.float32)
    _, prices, _ = repair(candidates(cost), 5, np.zeros(12))
    few = sparse(lambda some: cost[some], 60, 12, "row", prices, 5)
    assert few.cost.shape == (60, 5)
    place, _, full = repair(few, 5, prices)
    assert len(full) == 0
    np.testing.assert_allclose(total(cost.astype(np.float64), place), optimum(cost.astype(np.float64), 5), rtol=1e-6)


def test_search_finds_shortest_distances() -> None:
    draw = np.random.default_rng(1)
    arcs = draw.random((9, 9))
    arcs[draw.random((9, 9)) < 0.6] = np.inf
    distance, parent = search(arcs, np.array([2]))
    slow = np.full(9, np.inf)
    slow[2] = 0
    for _ in range(9):
        slow = np.minimum(slow, (slow[:, None] + arcs).min(0))
    np.testing.assert_allclose(distance, slow)
    for end in np.flatnonzero(np.isfinite(distance)):
        if end != 2:
            assert np.isclose(distance[parent[end]] + arcs[parent[end], end], distance[end])
