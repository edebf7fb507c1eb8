# SPDX-License-Identifier: Apache-2.0
"""Assigns words to the lines of one side of the table: a transportation problem, solved exactly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline_lightrnn.allocation.candidates import Candidates, Costs, checked, dense, dual_bound, sparse
from paceline_lightrnn.allocation.optional import assign
from paceline_lightrnn.allocation.prices import anneal, solve_prices
from paceline_lightrnn.allocation.repair import repair

KEEP = 40
"""Candidate lines of each word; up to three times as many lines are all candidates."""
SAMPLE = 8
"""Words for each line in the sample that gives the first prices."""

Told = Callable[[str, int, int], None]


class Side:
    """One side of the table: rows, or columns.

    Args:
        costs: of words in the lines of this side.
        words: V.
        lines: how many lines.
        capacity: words that fit into each.
        what: "row" or "column", for errors and progress.
    """

    def __init__(self, costs: Costs, words: int, lines: int, capacity: int, what: str) -> None:
        self.costs, self.words, self.lines, self.capacity, self.what = costs, words, lines, capacity, what

    def priced(self, seed: int, told: Told) -> tuple[Candidates, np.ndarray]:
        """The candidates, and prices that spread the words nearly evenly."""
        name = f"{self.what} prices"
        everything = np.arange(self.words)
        if self.lines == 1:
            return dense(self.costs, everything, 1, self.what), np.zeros(1)
        if self.lines <= 3 * KEEP:
            candidates = dense(self.costs, everything, self.lines, self.what)
            plan = anneal(candidates)
            return candidates, solve_prices(
                candidates, self.capacity, None, plan, lambda k: told(name, k, len(plan.temperatures))
            )
        count = min(self.words, SAMPLE * self.lines)
        some = np.sort(np.random.default_rng(seed).choice(self.words, count, replace=False))
        few = dense(self.costs, some, self.lines, self.what)
        first = anneal(few)
        prices = solve_prices(
            few, self.capacity * count / self.words, None, first, lambda k: told(f"{name}, sample", k, 7)
        )
        candidates = sparse(
            self.costs,
            self.words,
            self.lines,
            self.what,
            prices,
            KEEP,
            lambda done: told(f"{self.what} candidates", done, self.words),
        )
        last = anneal(candidates, levels=2, hottest=0.05)
        return candidates, solve_prices(candidates, self.capacity, prices, last, lambda k: told(name, k, 2))

    def bound(self, prices: np.ndarray) -> float:
        """What all words together cost at least on this side."""
        return dual_bound(self.costs, self.words, self.lines, self.capacity, prices, self.what)

    def spread(self, seed: int, told: Told) -> dict[str, np.ndarray]:
        """The cheapest line of each word where no line has too many, and the prices that prove it.

        Returns:
            By name: `row` (or `column`), shape (V,), int64; `row_prices`, shape (lines,), float64.
        """
        candidates, prices = self.priced(seed, told)
        place, prices, full = repair(
            candidates, self.capacity, prices, lambda done, total: told(f"{self.what} words", done, total)
        )
        if len(full):
            place = self._make_room(place)
        return {self.what: place, f"{self.what}_prices": prices}

    def _make_room(self, place: np.ndarray) -> np.ndarray:
        """Words of lines that are too full take any line with room, by their real costs: no candidate had any."""
        load = np.bincount(place, minlength=self.lines)
        while (over := int(np.maximum(load - self.capacity, 0).sum())) > 0:
            line = int(np.argmax(load))
            room = np.flatnonzero(load < self.capacity)
            words = np.flatnonzero(place == line)
            cost = checked(self.costs, words, self.what).astype(np.float64)
            # Each place with room can be taken once, and no more words than the line has too many have to leave.
            leave = min(int(load[line]) - self.capacity, len(room))
            change = cost[:, room] - cost[:, [line]]
            some = np.argsort(change.min(1), kind="stable")[: max(4 * leave, 64)]
            at, to = assign(change[some])
            cheapest = np.argsort(change[some][at, to], kind="stable")[:leave]
            place[words[some[at[cheapest]]]] = room[to[cheapest]]
            load = np.bincount(place, minlength=self.lines)
            if int(np.maximum(load - self.capacity, 0).sum()) >= over:
                raise AssertionError(f"{over} words found no room in {self.lines} lines of {self.capacity}")
        return place
