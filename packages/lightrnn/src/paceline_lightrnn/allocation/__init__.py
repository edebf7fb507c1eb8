# SPDX-License-Identifier: Apache-2.0
"""Re-allocation: a new assignment of the words to the cells of a table, at lower cost.

The costs are `l(w,i,j) = l_r(w,i) + l_c(w,j)` (`paceline_lightrnn.costs`); wanted is the perfect matching of words and
cells of least cost (Li et al., "LightRNN", NIPS 2016, section 3.3). Small vocabularies are matched exactly. For large
ones the rows are a transportation problem, solved exactly among each word's candidates (`prices`, `repair`); then the
words of each row are assigned to columns exactly (`inside`); then words in poor cells change row and column together
(`joint`). No phase raises the cost, and a table no better than the given one is not returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from paceline import MismatchError, UnsupportedError
from paceline_lightrnn.allocation.inside import settle
from paceline_lightrnn.allocation.joint import Sets, Standing, sweep
from paceline_lightrnn.allocation.progress import Journal
from paceline_lightrnn.allocation.spread import Side, Told
from paceline_lightrnn.allocation.whole import best_cells
from paceline_lightrnn.costs import CostSource
from paceline_lightrnn.table import WordTable

__all__ = ["Allocation", "reallocate"]

EXACT = 4000
"""Most words for the exact matching: 130 MB and about ten seconds."""
LINES = 8192
"""Most rows or columns: the graph of changes has the square of it."""
SWEEPS = 4
SHARE = 0.98
"""Share of all possible gain that the words of a sweep hold."""
SETS = 1200
"""Most sets of joint moves in a sweep."""
FRACTION = 0.02
"""Sweeps end when one lowers the cost by less than this part of its distance to the lower bound."""


@dataclass(frozen=True)
class Allocation:
    """The result of a re-allocation.

    Attributes:
        table: the new table; the given one if no better was found.
        before: the cost of the given table, in nats, summed over the text on which the costs were gathered.
        after: the cost of `table`, never more than `before`.
        lower_bound: no table of this shape costs less.
        method: "exact" or "rows, columns, joint moves".
        seconds: of clock time, over all starts if it was resumed.
    """

    table: WordTable
    before: float
    after: float
    lower_bound: float
    method: str
    seconds: float


def reallocate(
    costs: CostSource,
    table: WordTable,
    *,
    progress: Told | None = None,
    resume: Path | None = None,
    seed: int = 0,
    exact_words: int = EXACT,
    sweeps: int = SWEEPS,
) -> Allocation:
    """Find a table of the same shape with lower cost; never one with higher cost.

    Args:
        costs: of all words; finite.
        table: the present one.
        progress: called with the phase's name, the work done and the total.
        resume: a folder for finished phases; a call with the same arguments continues after them. The file is removed
            at the end.
        seed: of the sample of words for the first prices.
        exact_words: most words for the exact matching, which takes `16 V**2` bytes or more.
        sweeps: most sweeps of joint moves; the first gains by far the most.

    Raises:
        MismatchError: costs and table do not have the same shape.
        NonFiniteError: a cost is inf or nan.
        CheckpointError: the folder holds another re-allocation's phases, or damaged ones.
        UnsupportedError: SciPy is missing, or the table has too many rows or columns.
    """
    if (costs.words, costs.rows, costs.columns) != (table.words, table.rows, table.columns):
        raise MismatchError(
            f"costs are of {costs.words} words in {costs.rows} x {costs.columns}, the table is {table!r}; "
            "gather the costs with the model of this table"
        )
    job = _Job(costs, table, progress or (lambda phase, done, total: None), Journal(resume, costs, table, seed), seed)
    exact = table.words <= exact_words and table.words * table.rows * table.columns <= 2 * exact_words**2
    if not exact and max(table.shape) > LINES:
        raise UnsupportedError(
            f"a table of {table.rows} x {table.columns} has too many rows or columns; up to {LINES} of each can be "
            "re-allocated: make it squarer"
        )
    found = job.exact() if exact else job.large(sweeps)
    job.journal.remove()
    return found


class _Job:
    def __init__(self, costs: CostSource, table: WordTable, told: Told, journal: Journal, seed: int) -> None:
        self.costs, self.table, self.told, self.journal, self.seed = costs, table, told, journal, seed
        self.begun = time.monotonic() - journal.finished.seconds
        self.given = table.cells.cpu().numpy()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def phase(self, name: str, work: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Do the work, unless an earlier start finished it; returns the arrays of all finished phases."""
        if name not in self.journal.finished.phases:
            self.journal.write(name, self.seconds, **work())
        return self.journal.finished.arrays

    def exact(self) -> Allocation:
        def match() -> dict[str, np.ndarray]:
            self.told("matching", 0, 1)
            cells = best_cells(self.costs)
            self.told("matching", 1, 1)
            return {"cells": cells}

        cells = self.phase("matching", match)["cells"]
        nothing = np.zeros(self.table.rows), np.zeros(self.table.columns)
        sets = Sets(self.costs, *nothing)
        before, after = (float(sets.standing(x).paid.sum()) for x in (self.given, cells))
        return self.better(cells, before, after, min(before, after), "exact")

    def large(self, sweeps: int) -> Allocation:
        rows, columns = self.table.shape
        row = Side(self.costs.row_costs, self.table.words, rows, columns, "row")
        column = Side(self.costs.column_costs, self.table.words, columns, rows, "column")
        found = self.phase("rows", lambda: row.spread(self.seed, self.told))
        self.phase("column prices", lambda: {"column_prices": column.priced(self.seed, self.told)[1]})
        bound = row.bound(found["row_prices"]) + column.bound(found["column_prices"])
        found = self.phase("columns", lambda: {"cells": self.columns(found["row"], found["column_prices"])})
        sets = Sets(self.costs, found["row_prices"], found["column_prices"])
        old, new = sets.standing(self.given), sets.standing(found["cells"])
        before = _cost(sets, old)
        standing = new if _cost(sets, new) <= before else old
        cells = self.sweeps(sets, standing, bound, sweeps).cells
        return self.better(cells, before, _cost(sets, sets.standing(cells)), bound, "rows, columns, joint moves")

    def columns(self, row: np.ndarray, prices: np.ndarray) -> np.ndarray:
        """Cells with the words of each row in their best columns."""
        rows, columns = self.table.shape
        place = settle(
            self.costs.column_costs, row, rows, columns, prices, "column", lambda done: self.told("columns", done, rows)
        )
        cells: np.ndarray = row * columns + place
        return cells

    def sweeps(self, sets: Sets, standing: Standing, bound: float, most: int) -> Standing:
        """Joint moves until they gain little; returns the final placement."""
        for k in range(most):
            name = f"joint moves {k + 1}"
            if name in self.journal.finished.phases:
                if self.journal.finished.arrays["enough"].any():
                    break
                continue
            distance = _cost(sets, standing) - bound
            gain, _ = sweep(sets, standing, SHARE, SETS, partial(self.told, name))
            enough = np.array([gain <= FRACTION * distance])
            self.journal.write(name, self.seconds, cells=standing.cells, enough=enough)
            if enough.any():
                break
        return standing

    def better(self, cells: np.ndarray, before: float, after: float, bound: float, method: str) -> Allocation:
        """The new table, if it is better than the given one."""
        if after >= before:
            return Allocation(self.table, before, before, min(bound, before), method, self.seconds)
        table = self.table.with_cells(torch.from_numpy(cells))
        return Allocation(table, before, after, min(bound, after), method, self.seconds)


def _cost(sets: Sets, standing: Standing) -> float:
    return float(standing.paid.sum() - sets.cell_prices(standing.cells).sum())
