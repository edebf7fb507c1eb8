# SPDX-License-Identifier: Apache-2.0
"""The gain law from measured losses: the best gain of each N, and the exponent with which it follows N.

    gain = N^p            p by least squares of log(gain) on log(N) through the origin, since one worker's gain is 1
    gain = c N^q          the same with a factor, which shows whether the origin is right

The best gain of one N is the vertex of the parabola through the lowest loss and its neighbours, over log(gain).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Best:
    """Where the loss is lowest.

    Attributes:
        gain: there.
        edge: whether it is the least or the largest gain that was tried, so that the best may lie beyond.
    """

    gain: float
    edge: bool


@dataclass(frozen=True)
class Law:
    """Fits of one seed.

    Attributes:
        exponent: p of gain = N^p.
        factor: c of gain = c N^q.
        slope: q, likewise; both None where only one N was tried.
    """

    exponent: float
    factor: float | None
    slope: float | None


def best_gain(losses: Mapping[float, float | None]) -> Best | None:
    """The best of gain -> loss, where None is a training that diverged; None where all did."""
    tried = sorted(losses)
    values = [math.inf if losses[gain] is None else float(losses[gain] or 0.0) for gain in tried]
    lowest = min(range(len(tried)), key=values.__getitem__)
    if not math.isfinite(values[lowest]):
        return None
    edge = lowest in (0, len(tried) - 1)
    around = slice(lowest - 1, lowest + 2)
    if edge or not all(map(math.isfinite, values[around])):
        return Best(tried[lowest], edge)
    return Best(math.exp(_vertex([math.log(gain) for gain in tried[around]], values[around])), False)


def _vertex(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the parabola through three points, of which the one in the middle is the lowest."""
    left, right = x[1] - x[0], x[1] - x[2]
    rises = left * (y[1] - y[2]), right * (y[1] - y[0])
    if rises[0] == rises[1]:  # three equal losses
        return x[1]
    return x[1] - 0.5 * (left * rises[0] - right * rises[1]) / (rises[0] - rises[1])


def law(best: Mapping[int, float]) -> Law | None:
    """The fits over N -> best gain; None where no N is left."""
    x = [math.log(workers) for workers in best]
    y = [math.log(gain) for gain in best.values()]
    if not x:
        return None
    exponent = sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
    if len(x) < 2:
        return Law(exponent, None, None)
    middle = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - middle[0]) ** 2 for a in x)
    slope = sum((a - middle[0]) * (b - middle[1]) for a, b in zip(x, y, strict=True)) / spread
    return Law(exponent, math.exp(middle[1] - slope * middle[0]), slope)
