# SPDX-License-Identifier: Apache-2.0
"""The candidate lines (rows or columns) of each word: few, so that memory is linear in the words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from paceline import NonFiniteError

Costs = Callable[[np.ndarray], np.ndarray]
"""From n words, int64, to their costs in every line, float32 of shape (n, lines): one side of a `CostSource`."""
BLOCK = 1 << 24
"""Costs computed at once: 64 MB."""


@dataclass(frozen=True)
class Candidates:
    """Costs of n words in their candidate lines.

    Attributes:
        cost: shape (n, K), float32: relative to the word's cheapest line, to keep small differences of large costs.
        line: shape (n, K), int16 or int32: the lines; None if they are all lines in order.
        lines: number of lines.
        base: shape (n,), float64: subtracted from each word's costs.
    """

    cost: np.ndarray
    line: np.ndarray | None
    lines: int
    base: np.ndarray

    @property
    def words(self) -> int:
        """n."""
        return len(self.cost)

    def of(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lines (int64) and costs (float64) of these words, shapes (len(words), K)."""
        cost = self.cost[words].astype(np.float64)
        if self.line is None:
            return np.broadcast_to(np.arange(self.lines), cost.shape), cost
        return self.line[words].astype(np.int64), cost

    def typical_margin(self) -> float:
        """The median over words of the distance between the best line and the next best ones."""
        some = self.cost[:: max(1, self.words // 10_000)]
        near = np.sort(some, 1)[:, : min(8, some.shape[1])].mean(1)
        middle = float(np.median(near))
        return middle if middle > 0 else max(float(near.mean()), 1e-12)


def blocks(words: np.ndarray, lines: int) -> Iterator[tuple[int, np.ndarray]]:
    """Pieces of `words`, each with its offset."""
    step = max(1, BLOCK // lines)
    for begin in range(0, len(words), step):
        yield begin, words[begin : begin + step]


def checked(costs: Costs, words: np.ndarray, what: str) -> np.ndarray:
    """The costs of these words; NonFiniteError names the first word with inf or nan."""
    block = costs(words)
    if not np.isfinite(block.sum(dtype=np.float64)):
        bad = np.argwhere(~np.isfinite(block))
        if len(bad):
            word, line = int(words[bad[0][0]]), int(bad[0][1])
            raise NonFiniteError(
                f"the cost of word {word} in {what} {line} is {block[tuple(bad[0])]}: costs have to be finite; "
                "the model has diverged, go back to its last checkpoint and gather the costs again"
            )
    return block


def dense(costs: Costs, words: np.ndarray, lines: int, what: str) -> Candidates:
    """All lines are candidates."""
    cost = np.empty((len(words), lines), np.float32)
    base = np.empty(len(words))
    for begin, some in blocks(words, lines):
        block = checked(costs, some, what)
        low = block.min(1, keepdims=True)
        base[begin : begin + len(some)] = low[:, 0]
        np.subtract(block, low, out=cost[begin : begin + len(some)])
    return Candidates(cost, None, lines, base)


def sparse(
    costs: Costs,
    words: int,
    lines: int,
    what: str,
    prices: np.ndarray,
    keep: int,
    told: Callable[[int], None] = lambda done: None,
) -> Candidates:
    """The `keep` lines of each word that are cheapest under `prices`."""
    cost = np.empty((words, keep), np.float32)
    line = np.empty((words, keep), np.int16 if lines < 1 << 15 else np.int32)
    base = np.empty(words)
    p = torch.from_numpy(prices).float()
    for begin, some in blocks(np.arange(words), lines):
        block = torch.from_numpy(checked(costs, some, what))
        low = block.amin(1, keepdim=True)
        block = block - low
        best = torch.topk(block + p, keep, dim=1, largest=False, sorted=False).indices
        end = begin + len(some)
        cost[begin:end] = torch.gather(block, 1, best).numpy()
        line[begin:end], base[begin:end] = best.numpy(), low[:, 0].numpy()
        told(end)
    return Candidates(cost, line, lines, base)


def dual_bound(costs: Costs, words: int, lines: int, capacity: int, prices: np.ndarray, what: str) -> float:
    """A lower bound on the cost of any placement, over all lines: `sum_w min_i (c + p_i) - capacity sum p`.

    Empty cells are words without cost: they take the line of the lowest price.
    """
    p = torch.from_numpy(prices)
    total = float((lines * capacity - words) * prices.min() - capacity * prices.sum())
    for _, some in blocks(np.arange(words), lines):
        block = torch.from_numpy(checked(costs, some, what))
        low = block.amin(1, keepdim=True)
        total += float(low.double().sum() + ((block - low) + p.float()).amin(1).double().sum())
    return total
