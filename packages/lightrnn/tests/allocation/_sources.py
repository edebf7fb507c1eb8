# SPDX-License-Identifier: Apache-2.0
"""Costs that are given as arrays, and made-up ones."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from paceline_lightrnn import WordTable


class Given:
    """Costs of words in rows, shape (V, R), and in columns, shape (V, C)."""

    def __init__(self, row: np.ndarray, column: np.ndarray) -> None:
        self.row, self.column = np.asarray(row, np.float32), np.asarray(column, np.float32)
        self.words, self.rows, self.columns = len(self.row), self.row.shape[1], self.column.shape[1]

    def row_costs(self, words: np.ndarray) -> np.ndarray:
        return self.row[words]

    def column_costs(self, words: np.ndarray) -> np.ndarray:
        return self.column[words]

    def cost(self, table: WordTable) -> float:
        """What all words cost in this table."""
        return self.at(table.cells.numpy())

    def at(self, cells: np.ndarray) -> float:
        each, (i, j) = np.arange(self.words), np.divmod(cells, self.columns)
        return float(self.row[each, i].sum(dtype=np.float64) + self.column[each, j].sum(dtype=np.float64))

    def best(self) -> float:
        """The least cost of all tables."""
        cost = (self.row[:, :, None].astype(np.float64) + self.column[:, None, :]).reshape(self.words, -1)
        return float(cost[linear_sum_assignment(cost)].sum())


def made_up(words: int, rows: int, columns: int, seed: int = 0, dimension: int = 12) -> Given:
    """Counts after Zipf's law, logits of low rank."""
    draw = np.random.default_rng(seed)
    count = np.maximum(1, np.round(words / (draw.permutation(words) + 2.7)))[:, None]
    sides = []
    for lines in (rows, columns):
        logits = draw.standard_normal((words, dimension)) @ draw.standard_normal((dimension, lines)) * 0.8
        logits += draw.standard_normal(lines)
        sides.append(count * (np.log(np.exp(logits).sum(1, keepdims=True)) - logits))
    return Given(*sides)
