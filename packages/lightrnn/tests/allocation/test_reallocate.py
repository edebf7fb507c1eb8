# SPDX-License-Identifier: Apache-2.0
"""Re-allocation as a whole: exact where it can be, near it otherwise, and never worse than before."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from _sources import Given, made_up
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import MismatchError, NonFiniteError, UnsupportedError
from paceline_lightrnn import WordTable, allocation, reallocate
from paceline_lightrnn.allocation import joint, spread

LARGE = 0
"""`exact_words` under which every table goes the way of the large ones."""


def test_solved_by_hand() -> None:
    """Words 0 and 1 must change places: each pays 1 + 1 where it is, and nothing in the other's cell."""
    costs = Given(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 0.0], [0.0, 1.0]]))
    for exact in (10, LARGE):
        found = reallocate(costs, WordTable(torch.tensor([0, 3]), 2, 2), exact_words=exact)
        assert found.table.cells.tolist() == [3, 0]
        assert (found.before, found.after) == (4.0, pytest.approx(0.0, abs=1e-6))
        assert found.lower_bound <= found.after + 1e-6
        assert found.method == ("exact" if exact else "rows, columns, joint moves")
        assert found.seconds > 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.integers(0, 10**6))
def test_against_every_table_there_is(words: int, rows: int, columns: int, values: int, exact: bool, seed: int) -> None:
    words = min(words, rows * columns)
    draw = np.random.default_rng(seed)
    costs = Given(draw.integers(0, values, (words, rows)), draw.integers(0, values, (words, columns)))
    table = WordTable.random(words, rows, columns, seed=seed)
    best = min(costs.at(np.array(cells)) for cells in permutations(range(rows * columns), words))
    found = reallocate(costs, table, exact_words=10 if exact else LARGE)
    assert found.before == pytest.approx(costs.cost(table))
    assert found.after == pytest.approx(costs.cost(found.table), abs=1e-6)
    assert found.after <= found.before
    assert found.lower_bound - 1e-4 <= best <= found.after + 1e-6
    if exact:
        assert found.after == best


@pytest.mark.parametrize(("rows", "columns"), [(20, 20), (10, 40), (23, 18), (30, 30)])
def test_the_large_way_is_near_the_optimum(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sets of joint moves that hold only some of the words."""
    monkeypatch.setattr(joint, "SET", 150)
    monkeypatch.setattr(joint, "SEEDS", 16)
    costs = made_up(400, rows, columns)
    table = WordTable.random(400, rows, columns)
    best = reallocate(costs, table)
    assert best.method == "exact"
    assert best.after == pytest.approx(costs.best())
    found = reallocate(costs, table, exact_words=LARGE)
    assert found.lower_bound <= best.after <= found.after <= 1.02 * best.after
    assert found.after == pytest.approx(costs.cost(found.table), rel=1e-6)
    assert (found.after - best.after) <= 0.005 * (found.before - best.after)


@pytest.mark.parametrize("exact", [4000, LARGE])
def test_no_start_is_made_worse(exact: int) -> None:
    """From chance, from the optimum and from near it; a table that cannot be bettered is handed back as it is."""
    costs = made_up(140, 12, 12, seed=3)
    table = WordTable.random(140, 12, 12)
    best = reallocate(costs, table).table
    assert reallocate(costs, best, exact_words=exact).table is best
    cells = best.cells.clone()
    cells[[0, 5]] = cells[[5, 0]]
    for start in (table, best.with_cells(cells)):
        found = reallocate(costs, start, exact_words=exact)
        assert found.after <= found.before
        assert costs.cost(found.table) == pytest.approx(found.after, rel=1e-6)


def test_few_candidates_and_words_that_find_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one candidate line a word, some find no room there; the joint moves mend most of it."""
    monkeypatch.setattr(spread, "KEEP", 1)
    monkeypatch.setattr(spread, "SAMPLE", 3)
    rescued: list[int] = []
    make_room = spread.Side._make_room

    def counted(side: spread.Side, place: np.ndarray) -> np.ndarray:
        rescued.append(1)
        placed = make_room(side, place)
        assert np.bincount(placed, minlength=side.lines).max() <= side.capacity
        return placed

    monkeypatch.setattr(spread.Side, "_make_room", counted)
    for seed in range(2):
        costs = made_up(200, 14, 15, seed)
        table = WordTable.random(200, 14, 15)
        found = reallocate(costs, table, exact_words=LARGE, seed=seed)
        assert found.lower_bound <= costs.best() <= found.after <= 1.05 * costs.best()
    assert rescued


@pytest.mark.parametrize(("words", "rows", "columns"), [(1, 1, 1), (1, 2, 3), (7, 1, 9), (7, 9, 1), (12, 1, 12)])
def test_narrow_tables_are_matched_exactly(words: int, rows: int, columns: int) -> None:
    costs = made_up(words, rows, columns, seed=2)
    for exact in (4000, LARGE):
        found = reallocate(costs, WordTable.random(words, rows, columns), exact_words=exact)
        assert found.after == pytest.approx(costs.best(), rel=1e-6)


def test_all_costs_alike() -> None:
    table = WordTable.random(30, 6, 6)
    for exact in (4000, LARGE):
        found = reallocate(Given(np.ones((30, 6)), np.zeros((30, 6))), table, exact_words=exact)
        assert found.table is table
        assert found.after == pytest.approx(30)


def test_the_same_seed_finds_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "KEEP", 4)
    costs = made_up(200, 14, 15)
    first, second = (reallocate(costs, WordTable.random(200, 14, 15), exact_words=LARGE, seed=5) for _ in range(2))
    assert first.table == second.table


def test_progress_names_what_is_done() -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    costs = made_up(100, 10, 10)
    reallocate(
        costs,
        WordTable.random(100),
        exact_words=LARGE,
        progress=lambda phase, done, total: told.setdefault(phase, []).append((done, total)),
    )
    assert [*told][:4] == ["row prices", "row words", "column prices", "columns"]
    assert "joint moves 1" in told
    for steps in told.values():
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("exact", [4000, LARGE])
@pytest.mark.parametrize("side", ["row", "column"])
def test_costs_that_are_no_numbers_are_refused(bad: float, exact: int, side: str) -> None:
    costs = made_up(20, 5, 4)
    getattr(costs, side)[13, 2] = bad
    with pytest.raises(NonFiniteError, match=f"word 13 in {side} 2 is {bad}"):
        reallocate(costs, WordTable.random(20, 5, 4), exact_words=exact)


def test_costs_of_another_table_are_refused() -> None:
    with pytest.raises(MismatchError, match="20 words in 5 x 4"):
        reallocate(made_up(20, 5, 4), WordTable.random(20, 4, 5))


def test_tables_that_are_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "LINES", 19)
    with pytest.raises(UnsupportedError, match="20 x 1"):
        reallocate(made_up(20, 20, 1), WordTable.random(20, 20, 1), exact_words=LARGE)


def test_without_scipy_what_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    for exact in (4000, LARGE):
        with pytest.raises(UnsupportedError, match="pip install scipy"):
            reallocate(made_up(20, 5, 4), WordTable.random(20, 5, 4), exact_words=exact)
