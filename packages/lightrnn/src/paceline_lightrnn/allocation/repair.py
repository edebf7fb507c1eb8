# SPDX-License-Identifier: Apache-2.0
"""From nearly even prices to the exact optimum: shortest augmenting paths on the graph of the lines.

Every word begins in its cheapest line under the prices, so no move lowers the cost (complementary slackness), but some
lines hold too many words. An arc from line i to line j is the cheapest change of one word of i
to j. A shortest path from a full line to a line with room, by costs reduced by the prices, is taken by moving one
word along each of its arcs; then the prices follow the distances. This keeps optimality, so the end is the optimum
(successive shortest paths: Ahuja, Magnanti, Orlin, "Network Flows", 1993, section 9.7). One search serves all paths
of its tree that share no arc. Cells without word are words that cost nothing anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline_lightrnn.allocation.candidates import Candidates

UNPLACED = -1


class Lines:
    """The words of each line, and the cheapest change of a word from each line to each other."""

    def __init__(self, candidates: Candidates, capacity: int, prices: np.ndarray) -> None:
        self.candidates, self.capacity, self.prices = candidates, capacity, prices - prices.min()
        self.count = candidates.lines
        self.place, self.own = _cheapest(candidates, self.prices)
        order = np.argsort(self.place, kind="stable")
        ends = np.cumsum(np.bincount(self.place, minlength=self.count))
        self.members: list[np.ndarray] = np.split(order, ends[:-1])
        self.arc = np.full((self.count, self.count), np.inf)
        self.empty = self._spread_empty()
        self.refresh(range(self.count))

    @property
    def load(self) -> np.ndarray:
        """Words and empty cells in each line."""
        held: np.ndarray = np.array([len(words) for words in self.members]) + self.empty
        return held

    def _spread_empty(self) -> np.ndarray:
        """Assign empty cells to the lines of price 0, first to those with room."""
        left = self.count * self.capacity - len(self.place)
        free = np.flatnonzero(self.prices <= 0)
        empty = np.zeros(self.count, np.int64)
        for line in free:
            empty[line] = min(left, max(0, self.capacity - len(self.members[line])))
            left -= int(empty[line])
        empty[free[0]] += left
        return empty

    def refresh(self, lines: list[int] | range) -> None:
        """Find the cheapest changes from these lines, after their words changed."""
        for i in lines:
            words = self.members[i]
            arc = np.full(self.count, np.inf)
            if len(words):
                line, cost = self.candidates.of(words)
                np.minimum.at(arc, line.ravel(), (cost - self.own[words][:, None]).ravel())
            if self.empty[i]:
                arc = np.minimum(arc, 0.0)
            arc[i] = np.inf
            self.arc[i] = arc

    def mover(self, i: int, j: int, moved: set[int]) -> tuple[int, float] | None:
        """The word of the arc from i to j and its cost in j; `UNPLACED` is an empty cell; None: it has moved."""
        if self.empty[i] and self.arc[i, j] == 0.0:
            return UNPLACED, 0.0
        words = self.members[i]
        line, cost = self.candidates.of(words)
        at, which = np.nonzero((line == j) & (cost - self.own[words][:, None] == self.arc[i, j]))
        for a, k in zip(at, which, strict=True):
            if int(words[a]) not in moved:
                return int(words[a]), float(cost[a, k])
        return None

    def move(self, path: list[tuple[int, int]], moved: set[int]) -> bool:
        """Move one word along each arc of the path, unless one of them has moved before; whether it did."""
        plan = []
        for i, j in path:
            found = self.mover(i, j, moved)
            if found is None or (found[0] == UNPLACED and self.empty[i] < 1):
                return False
            plan.append((i, j, *found))
        for i, j, word, cost in plan:
            if word == UNPLACED:
                self.empty[i] -= 1
                self.empty[j] += 1
                continue
            moved.add(word)
            self.members[i] = self.members[i][self.members[i] != word]
            self.members[j] = np.append(self.members[j], word)
            self.place[word], self.own[word] = j, cost
        return True


def repair(
    candidates: Candidates,
    capacity: int,
    prices: np.ndarray,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The cheapest placement among the candidates.

    Returns:
        The line of each word, shape (words,), int64; the prices that prove it, shape (lines,); and the lines that still
        hold too many words, since no path of candidates leads from them to a line with room: mostly none.
    """
    lines = Lines(candidates, capacity, prices)
    total = int(np.maximum(lines.load - capacity, 0).sum())
    while True:
        over = lines.load - capacity
        told(total - int(np.maximum(over, 0).sum()), total)
        if not (over > 0).any():
            return lines.place, lines.prices, np.empty(0, np.int64)
        reduced = np.maximum(lines.arc + lines.prices[None, :] - lines.prices[:, None], 0.0)
        distance, parent = search(reduced, np.flatnonzero(over > 0))
        ends = np.flatnonzero((over < 0) & np.isfinite(distance))
        if not len(ends):
            return lines.place, lines.prices, np.flatnonzero(over > 0)
        far = distance[ends].max()
        lines.prices = lines.prices - np.minimum(distance, far)
        changed = augment(lines, over, ends[np.argsort(distance[ends], kind="stable")], parent)
        lines.refresh(sorted(changed))


def augment(lines: Lines, over: np.ndarray, ends: np.ndarray, parent: np.ndarray) -> set[int]:
    """Fill each end along the tree of shortest paths, using no arc twice; returns the changed lines."""
    used: set[tuple[int, int]] = set()
    changed: set[int] = set()
    moved: set[int] = set()
    for end in ends:
        path, at = [], int(end)
        while parent[at] >= 0:
            path.append((int(parent[at]), at))
            at = int(parent[at])
        if over[at] < 1 or not used.isdisjoint(path) or not lines.move(path, moved):
            continue
        used.update(path)
        over[at] -= 1
        changed.update(i for arc in path for i in arc)
    return changed


def search(reduced: np.ndarray, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Dijkstra on a dense graph: distances from the nearest source and the tree's parents (-1: a source, or none)."""
    count = len(reduced)
    distance, open_ = np.full(count, np.inf), np.full(count, np.inf)
    parent = np.full(count, -1, np.int64)
    open_[sources] = 0.0
    done = np.zeros(count, bool)
    for _ in range(count):
        i = int(open_.argmin())
        near = open_[i]
        if near == np.inf:
            break
        distance[i], open_[i], done[i] = near, np.inf, True
        through = reduced[i] + near
        better = (through < open_) & ~done
        open_[better] = through[better]
        parent[better] = i
    return distance, parent


def _cheapest(candidates: Candidates, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The line of each word that is cheapest under the prices, and its cost there."""
    place, own = np.empty(candidates.words, np.int64), np.empty(candidates.words)
    step = 1 << 16
    for begin in range(0, candidates.words, step):
        line, cost = candidates.of(np.arange(begin, min(begin + step, candidates.words)))
        best = (cost + prices[line]).argmin(1)
        each = np.arange(len(best))
        place[begin : begin + step], own[begin : begin + step] = line[each, best], cost[each, best]
    return place, own
