# SPDX-License-Identifier: Apache-2.0
"""Did a change raise the held-out loss? A forecast from the curve before it.

    ln L = a + b ln M + noise                                    at m points before the change
    e    = mean_j (ln L_j - a - b ln M_j)                        over n points after it: the excess
    s_e^2 = s^2 r (1/m + 1/n + (x_n - x_m)^2 / S),    r = (1 + c) / (1 - c)
    charge = e + t s_e                                           e is below it at the confidence of t

L is the held-out loss, M the minibatches of all workers, x = ln M with the mean x_m before and x_n after, and
S = sum (x - x_m)^2 before. s is the larger of the residuals' standard deviations before and after, c their lag-one
correlation before where it is positive, so that points which lie close together do not count as many. t is Student's
with m - 2 degrees of freedom.

Source: prediction from a regression line (Draper & Smith, Applied Regression Analysis, 1.4 and 3.1); Student's quantile
by Cornish and Fisher's expansion (Abramowitz & Stegun 26.7.5). That a loss is locally a power law of the samples:
Hestness et al., arXiv 1712.00409.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean

LEAST = 12
"""The fewest points before a change."""
CORRELATION = 0.95
"""The largest lag-one correlation that is reckoned with."""

Point = tuple[float, float]
"""(M, ln L)."""


def student(confidence: float, freedom: int) -> float:
    """t, which Student's variable with so many degrees of freedom stays below with this probability.

    >>> round(student(0.95, 10), 2)
    1.81
    """
    z = NormalDist().inv_cdf(confidence)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


@dataclass(frozen=True)
class Excess:
    """What a change cost.

    Attributes:
        mean: e, a share of the loss.
        margin: t s_e.
    """

    mean: float
    margin: float

    @property
    def most(self) -> float:
        """The charge."""
        return self.mean + self.margin

    @property
    def least(self) -> float:
        """What the change cost at least, at the same confidence."""
        return self.mean - self.margin

    @classmethod
    def paired(cls, before: Sequence[float], after: Sequence[float], confidence: float) -> Excess:
        """What two branches from one state show, which had the same samples.

        Args:
            before, after: ln L without and with the change, at the same places, at least 3.
            confidence: of one side.
        """
        above = [with_it - without for without, with_it in zip(before, after, strict=True)]
        mean, count = fmean(above), len(above)
        squares = math.fsum((one - mean) ** 2 for one in above)
        following = math.fsum((one - mean) * (other - mean) for one, other in pairwise(above))
        s = math.sqrt(squares / (count - 1) * _together(following, squares) / count)
        return cls(mean, student(confidence, count - 1) * s)


def _together(following: float, squares: float) -> float:
    """r, from the sums of products of neighbours, and of squares."""
    c = min(max(0.0, following / squares if squares else 0.0), CORRELATION)
    return (1 + c) / (1 - c)


@dataclass(frozen=True)
class LossCurve:
    """The line through the points before a change.

    Attributes:
        points: m.
        x, y: means of ln M and ln L.
        slope: b.
        spread: S.
        noise: s before.
        together: r.
    """

    points: int
    x: float
    y: float
    slope: float
    spread: float
    noise: float
    together: float

    @classmethod
    def through(cls, points: Sequence[Point]) -> LossCurve | None:
        """The line through at least three points; None where they are fewer, or all at one place."""
        count = len(points)
        xs, ys = [math.log(made) for made, _ in points], [loss for _, loss in points]
        if count < 3 or max(xs) - min(xs) < 1e-9:
            return None
        x, y = fmean(xs), fmean(ys)
        spread = math.fsum((one - x) ** 2 for one in xs)
        slope = math.fsum((one - x) * (loss - y) for one, loss in zip(xs, ys, strict=True)) / spread
        left = [loss - y - slope * (one - x) for one, loss in zip(xs, ys, strict=True)]
        squares = math.fsum(one * one for one in left)
        following = math.fsum(one * other for one, other in pairwise(left))
        noise = math.sqrt(squares / (count - 2))
        return cls(count, x, y, slope, spread, noise, _together(following, squares))

    def forecast(self, minibatches: float) -> float:
        """ln L at M, had nothing changed."""
        return self.y + self.slope * (math.log(minibatches) - self.x)

    def margin(self, xs: Sequence[float], confidence: float, noise: float | None = None) -> float:
        """t s_e for points at these M.

        Args:
            xs: M of each point.
            confidence: of one side.
            noise: s after the change; None where it is unknown.
        """
        away = fmean(math.log(one) for one in xs) - self.x
        parts = 1 / self.points + 1 / len(xs) + away**2 / self.spread
        s = max(self.noise, noise or 0.0)
        return student(confidence, self.points - 2) * s * math.sqrt(self.together * parts)

    def excess(self, after: Sequence[Point], confidence: float) -> Excess:
        """What these points are above the forecast."""
        above = [loss - self.forecast(made) for made, loss in after]
        mean = fmean(above)
        noise = math.sqrt(math.fsum((one - mean) ** 2 for one in above) / (len(above) - 1)) if len(above) > 1 else 0.0
        return Excess(mean, self.margin([made for made, _ in after], confidence, noise))


def steady(points: Sequence[Point], confidence: float) -> LossCurve | None:
    """The curve through the points, if the first half of them forecasts the second half; else None."""
    half = len(points) // 2
    before = LossCurve.through(points[:half])
    if len(points) < LEAST or before is None:
        return None
    found = before.excess(points[half:], confidence)
    return LossCurve.through(points) if abs(found.mean) <= found.margin else None
