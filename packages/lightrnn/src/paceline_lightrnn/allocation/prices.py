# SPDX-License-Identifier: Apache-2.0
"""Prices of the lines of a table (its rows, or its columns) that spread the words evenly: the smoothed dual.

The transportation problem `min sum_w c(w, line(w))`, each line at most `capacity` words, has the dual `max_p sum_w
min_i (c(w,i) + p_i) - capacity sum_i p_i` over `p >= 0`. The inner minimum is smoothed with a temperature t, `-t log
sum_i exp(-(c + p_i) / t)`; the smooth problem in as few variables as there are lines is solved by L-BFGS, from a high
temperature to a low one (entropic optimal transport: Cuturi, NIPS 2013; its dual by quasi-Newton steps: Cuturi and
Peyre, SIAM J. Imaging Sciences 9, 2016). Shortest paths repair the rest exactly (`repair`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline_lightrnn.allocation.candidates import Candidates

CHUNK = 1 << 22
"""Costs in one piece, to bound temporary memory."""
COLDEST = 0.002
"""The last temperature, relative to the typical distance between a word's best lines."""


@dataclass(frozen=True)
class Annealing:
    """The temperatures, in units of the costs, and the steps at each."""

    temperatures: tuple[float, ...]
    steps: int = 25


def anneal(candidates: Candidates, *, levels: int = 7, hottest: float = 4.0) -> Annealing:
    """Temperatures from `hottest` to `COLDEST` times the median margin of the words."""
    margin = candidates.typical_margin()
    return Annealing(tuple(float(t) for t in np.geomspace(hottest * margin, COLDEST * margin, levels)))


def solve_prices(
    candidates: Candidates,
    capacity: float,
    start: np.ndarray | None,
    plan: Annealing,
    told: Callable[[int], None] = lambda level: None,
) -> np.ndarray:
    """Prices, shape (lines,), float64, none below 0, under which about `capacity` words choose each line.

    Args:
        candidates: the costs.
        capacity: words that fit into each line (a fraction if the candidates are a sample of the words).
        start: prices to begin with; 0 by default.
        plan: the temperatures.
        told: called with the number of finished temperatures.
    """
    from paceline_lightrnn.allocation.optional import minimize

    prices = np.zeros(candidates.lines) if start is None else start - start.min()
    # If too many words share few candidates, no price is high enough; prices from a sample with all lines bound it.
    most = None if start is None else 2 * float(prices.max()) + candidates.typical_margin()
    for level, temperature in enumerate(plan.temperatures):
        # In units of the temperature and of the capacity, so that L-BFGS' own thresholds mean the same everywhere.
        scale = capacity * temperature

        def loss(scaled: np.ndarray, t: float = temperature, scale: float = scale) -> tuple[float, np.ndarray]:
            value, load = smoothed(candidates, scaled * t, t)
            return float(scaled.sum()) - value / scale, 1.0 - load / capacity

        found = minimize(
            loss,
            prices / temperature,
            jac=True,
            method="L-BFGS-B",
            bounds=[(0, None if most is None else most / temperature)] * candidates.lines,
            options={"maxiter": plan.steps, "maxfun": 2 * plan.steps, "gtol": 0.005, "ftol": 1e-12},
        )
        prices = np.asarray(found.x, np.float64) * temperature
        told(level + 1)
    return prices


def smoothed(candidates: Candidates, prices: np.ndarray, temperature: float) -> tuple[float, np.ndarray]:
    """`sum_w -t log sum_i exp(-(c(w,i) + p_i) / t)` and its gradient, shape (lines,): the words of each line."""
    p = torch.from_numpy(prices).float()
    load = torch.zeros(candidates.lines, dtype=torch.float64)
    value = 0.0
    for line, cost in _pieces(candidates):
        x = (cost + (p if line is None else p[line])).div_(-temperature)
        top = x.amax(1, keepdim=True)
        x = x.sub_(top).exp_()
        total = x.sum(1, keepdim=True)
        value -= temperature * float((top.double() + total.double().log()).sum())
        x.div_(total)
        if line is None:
            load += x.sum(0, dtype=torch.float64)
        else:
            load += torch.bincount(line.reshape(-1), x.reshape(-1), candidates.lines).double()
    return value, load.numpy()


def _pieces(candidates: Candidates) -> Iterator[tuple[Tensor | None, Tensor]]:
    step = max(1, CHUNK // candidates.cost.shape[1])
    for begin in range(0, candidates.words, step):
        line = None if candidates.line is None else torch.from_numpy(candidates.line[begin : begin + step]).int()
        yield line, torch.from_numpy(candidates.cost[begin : begin + step])
