# SPDX-License-Identifier: Apache-2.0
"""Joint moves lower the cost, keep cells apart and know what each word pays."""

from __future__ import annotations

import numpy as np
import pytest
from _sources import Given, made_up
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_lightrnn.allocation import joint
from paceline_lightrnn.allocation.joint import Sets, settle_set, sweep


def start(costs: Given, seed: int) -> tuple[Sets, np.ndarray]:
    draw = np.random.default_rng(seed)
    sets = Sets(costs, draw.random(costs.rows) * 3, draw.random(costs.columns) * 3)
    return sets, draw.permutation(costs.rows * costs.columns)[: costs.words]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(0, 10**6), st.integers(3, 40))
def test_the_cost_falls_by_what_it_says(words: int, seed: int, size: int) -> None:
    """With empty cells in the sets, too: whatever the prices, only what the words cost counts."""
    costs = made_up(words, 5, 7, seed)
    sets, cells = start(costs, seed)
    standing = sets.standing(cells)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "SET", size)
        patch.setattr(joint, "SEEDS", 2)
        gain, count = sweep(sets, standing, 1.0, 100)
    assert count >= 1
    assert gain >= 0
    assert len(set(standing.cells.tolist())) == words
    np.testing.assert_allclose(costs.at(cells) - gain, costs.at(standing.cells), rtol=1e-5, atol=1e-4)
    again = sets.standing(standing.cells)
    np.testing.assert_allclose(standing.paid, again.paid, rtol=1e-6, atol=1e-6)


def test_a_set_of_all_cells_is_the_optimum() -> None:
    costs = made_up(30, 5, 7)
    sets, cells = start(costs, 1)
    standing = sets.standing(cells)
    holder = np.full(35, joint.FREE)
    holder[cells] = np.arange(30)
    fall = settle_set(sets, standing, holder, np.arange(35))
    assert fall > 0
    np.testing.assert_allclose(costs.at(standing.cells), costs.best(), rtol=1e-6)
    assert settle_set(sets, standing, holder, np.arange(35)) == 0.0
    assert (holder[standing.cells] == np.arange(30)).all()


def test_no_more_sets_than_allowed() -> None:
    costs = made_up(200, 15, 15)
    sets, cells = start(costs, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "SET", 20)
        patch.setattr(joint, "SEEDS", 2)
        told: list[tuple[int, int]] = []
        assert sweep(sets, sets.standing(cells), 1.0, 3, lambda done, total: told.append((done, total)))[1] == 3
    assert len(told) == 3
    assert told[-1][1] == 200
