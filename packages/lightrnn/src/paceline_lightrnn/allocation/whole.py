# SPDX-License-Identifier: Apache-2.0
"""The exact answer for small vocabularies: all words over all cells at once."""

from __future__ import annotations

import numpy as np

from paceline_lightrnn.allocation.candidates import checked
from paceline_lightrnn.allocation.optional import assign
from paceline_lightrnn.costs import CostSource


def best_cells(costs: CostSource) -> np.ndarray:
    """The cells, shape (V,), int64, of the cheapest placement; `8 V R C` bytes, time of about the third power of V."""
    words = np.arange(costs.words)
    row = checked(costs.row_costs, words, "row").astype(np.float64)
    column = checked(costs.column_costs, words, "column").astype(np.float64)
    # A word's own minimum is no choice: without it, big costs leave the small differences their digits.
    row, column = row - row.min(1, keepdims=True), column - column.min(1, keepdims=True)
    _, cells = assign((row[:, :, None] + column[:, None, :]).reshape(len(words), -1))
    return cells.astype(np.int64)
