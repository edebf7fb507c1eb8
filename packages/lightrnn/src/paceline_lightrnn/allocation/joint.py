# SPDX-License-Identifier: Apache-2.0
"""Joint moves: a few hundred words at a time change row and column together, exactly among their cells.

After the rows and the columns inside the rows are assigned, changing rows alone or columns alone gains nothing. But
words that compete for a column of one row have not tried other rows. A word's regret bounds its gain: its cost and the
prices of its cell, less its cheapest row and column under the prices. The sum of regrets is the distance to the lower
bound. Words with the greatest regrets and the words in the cells that they prefer form a set, which is reassigned
exactly to its own cells (a large neighbourhood; Ahuja, Ergun, Orlin, Punnen, "A survey of very large-scale neighborhood
search techniques", Discrete Applied Mathematics 123, 2002). The cost never rises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline_lightrnn.allocation.candidates import blocks, checked
from paceline_lightrnn.allocation.optional import assign
from paceline_lightrnn.costs import CostSource

SET = 1000
"""Cells in one set."""
WISHES = 8
"""Preferred cells that each word of great regret adds to the set, beside its own."""
SEEDS = 64
FREE = -1


@dataclass
class Standing:
    """A placement and the priced costs of its words.

    Attributes:
        cells: shape (V,), int64.
        paid: shape (V,), float64: each word's cost and the prices of its row and column.
        least: shape (V,), float64: the cheapest row and the cheapest column under the prices.
    """

    cells: np.ndarray
    paid: np.ndarray
    least: np.ndarray


class Sets:
    """Costs of words in cells, under the prices of rows and columns.

    Args:
        costs: of the words.
        row_prices: shape (R,).
        column_prices: shape (C,).
    """

    def __init__(self, costs: CostSource, row_prices: np.ndarray, column_prices: np.ndarray) -> None:
        self.costs, self.prices = costs, (row_prices, column_prices)

    def sides(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Priced costs of the words, float64, shapes (n, R) and (n, C)."""
        row = checked(self.costs.row_costs, words, "row").astype(np.float64)
        column = checked(self.costs.column_costs, words, "column").astype(np.float64)
        return np.add(row, self.prices[0], out=row), np.add(column, self.prices[1], out=column)

    def cell_prices(self, cells: np.ndarray) -> np.ndarray:
        """The prices of row and column of each cell together, shape (n,)."""
        i, j = np.divmod(cells, self.costs.columns)
        both: np.ndarray = self.prices[0][i] + self.prices[1][j]
        return both

    def standing(self, cells: np.ndarray) -> Standing:
        """The priced costs of the words in these cells."""
        found = Standing(cells.copy(), np.empty(len(cells)), np.empty(len(cells)))
        for begin, words in blocks(np.arange(len(cells)), 2 * (self.costs.rows + self.costs.columns)):
            row, column = self.sides(words)
            each, end = np.arange(len(words)), begin + len(words)
            i, j = np.divmod(cells[begin:end], self.costs.columns)
            found.paid[begin:end] = row[each, i] + column[each, j]
            found.least[begin:end] = row.min(1) + column.min(1)
        return found

    def wishes(self, words: np.ndarray) -> np.ndarray:
        """The cheapest cells of these words, shape (n, up to WISHES)."""
        row, column = self.sides(words)
        i, a = _lowest(row, WISHES)
        j, b = _lowest(column, WISHES)
        pairs = (a[:, :, None] + b[:, None, :]).reshape(len(words), -1)
        best, _ = _lowest(pairs, WISHES)
        cells = (i[:, :, None] * self.costs.columns + j[:, None, :]).reshape(len(words), -1)
        return np.take_along_axis(cells, best, 1)


def sweep(
    sets: Sets,
    standing: Standing,
    share: float,
    limit: int,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[float, int]:
    """Form a set around every word of great regret and reassign it; changes `standing`.

    Args:
        sets: the costs.
        standing: the placement.
        share: the words of greatest regret that together hold this share of all regret are tried.
        limit: most sets.
        told: called with the words done and the total.

    Returns:
        The decrease of the cost, and the number of sets.
    """
    regret = standing.paid - standing.least
    order = np.argsort(-regret, kind="stable")
    sums = np.cumsum(np.maximum(regret[order], 0))
    order = order[: int(np.searchsorted(sums, share * sums[-1])) + 1]
    holder = np.full(sets.costs.rows * sets.costs.columns, FREE, np.int64)
    holder[standing.cells] = np.arange(len(standing.cells))
    begin, gain, count = 0, 0.0, 0
    while begin < len(order) and count < limit:
        inside: np.ndarray = np.empty(0, np.int64)
        while begin < len(order) and len(inside) < SET:
            seeds = order[begin : begin + SEEDS]
            wanted = np.concatenate([standing.cells[seeds], sets.wishes(seeds).ravel()])
            inside, begin = np.union1d(inside, wanted), begin + len(seeds)
        gain, count = gain + settle_set(sets, standing, holder, inside), count + 1
        told(begin, len(order))
    return gain, count


def settle_set(sets: Sets, standing: Standing, holder: np.ndarray, cells: np.ndarray) -> float:
    """Reassign the words of these cells among them, exactly; returns the decrease of the cost."""
    words = holder[cells]
    words = words[words != FREE]
    i, j = np.divmod(cells, sets.costs.columns)
    row, column = sets.sides(words)
    cost = row[:, i] + column[:, j]
    # Empty cells are words without cost, so that prices change every assignment by the same sum.
    square = np.empty((len(cells), len(cells)))
    np.subtract(cost, cost.min(1, keepdims=True), out=square[: len(words)])
    square[len(words) :] = sets.prices[0][i] + sets.prices[1][j]
    at, to = assign(square)
    at, to = at[: len(words)], to[: len(words)]
    paid = cost[at, to]
    before = standing.paid[words] - sets.cell_prices(standing.cells[words])
    after = paid - sets.cell_prices(cells[to])
    fall = float((before[at] - after).sum())
    if fall <= 0:
        return 0.0
    holder[cells] = FREE
    standing.cells[words[at]], standing.paid[words[at]] = cells[to], paid
    holder[standing.cells[words]] = words
    return fall


def _lowest(x: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    count = min(count, x.shape[1])
    at = np.argpartition(x, count - 1, axis=1)[:, :count]
    return at, np.take_along_axis(x, at, 1)
