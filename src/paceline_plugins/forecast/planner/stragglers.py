# SPDX-License-Identifier: Apache-2.0
"""How long the slowest of N workers takes for k minibatches.

    S_i = X_i1 + .. + X_ik,                 E[max_i S_i] = N int Q(Phi(z)) phi(z) Phi(z)^(N-1) dz

X are one worker's step times, independent and identically distributed, Q the quantile function of S, phi and Phi the
density and the distribution of the standard normal (the order statistic's expectation with u = Phi(z)). The sum of k
lognormal times is taken for lognormal with the sum's mean and variance (Fenton 1960), which is exact for k = 1:

    s^2 = ln(1 + v^2 / k),   m = ln(k c) - s^2 / 2,   Q(Phi(z)) = exp(m + s z)       c the mean, v the coefficient
                                                                                     of variation of a step time

Sources: David & Nagaraja, Order Statistics (2003), section 3.1; L. Fenton, IRE Trans. Commun. Systems 8 (1960).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RuleError

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class LogNormal:
    """The distribution of the time of one minibatch on one worker; without spread all are equal."""

    mean_s: float  # c, above 0
    variation: float = 0.0  # v, at least 0

    def __post_init__(self) -> None:
        if not 0 < self.mean_s < math.inf:
            raise RuleError(f"the step time must be a number of seconds above 0, got {self.mean_s!r}")
        if not 0 <= self.variation < math.inf:
            raise RuleError(f"the spread of step times must be a number from 0 on, got {self.variation!r}")

    def _parameters(self, steps: int) -> tuple[float, float]:
        """(m, s) of the logarithm of a sum."""
        square = math.log1p(self.variation**2 / steps)
        return math.log(steps * self.mean_s) - square / 2, math.sqrt(square)

    def sums(self, steps: int, size: tuple[int, ...], generator: np.random.Generator) -> Numbers:
        """Independent sums of so many step times, an array of shape `size`, seconds."""
        if not steps or not self.variation:
            return np.full(size, steps * self.mean_s)
        m, s = self._parameters(steps)
        return np.asarray(np.exp(m + s * generator.standard_normal(size)))

    def slowest(self, steps: int, workers: int) -> float:
        """Expected maximum over the workers of the sum of so many step times, seconds."""
        if not steps or not self.variation or workers == 1:
            return steps * self.mean_s
        m, s = self._parameters(steps)
        z, weight = maximum_weights(workers)
        return float(np.sum(weight * np.exp(m + s * z)))


@lru_cache(maxsize=64)
def maximum_weights(workers: int) -> tuple[Numbers, Numbers]:
    """Places z and weights so that E[max of N draws f(z_i)] = sum of weights * f(z), z_i standard normal, f rising."""
    z = np.linspace(-9.0, 9.0, 6001)
    below = np.array([0.5 * math.erfc(-place / math.sqrt(2)) for place in z])
    middle = (z[1:] + z[:-1]) / 2
    return middle, np.diff(below**workers)
