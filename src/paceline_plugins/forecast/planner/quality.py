# SPDX-License-Identifier: Apache-2.0
"""What would another number of workers learn from the same samples? A forecast from one run's effective workers.

    c     = (N - E) / (E (N - 1))        correlation of two workers' displacements, from the E effective ones of N
    E_k   = k / (1 + (k - 1) c)          effective workers of k; at most 1 / c, whatever k is
    dX/dM = min(E_k / k, g_k)            progress X over minibatches M of all workers; c is the run's at the same X
    L_k   = L_N (X_N / X_k)^alpha        loss in the end; alpha is the slope of the run's own log loss over log X

Displacements d_i = s + n_i with a common s and independent n_i have E |d_i|^2 = |s|^2 + |n|^2 and
E |mean d|^2 = |s|^2 + |n|^2 / N. Their quotient is E, and c = |s|^2 / (|s|^2 + |n|^2) does not depend on N. X counts
the minibatches that one worker would make for the same progress. Displacements are most alike early in a training, so
c follows X: many workers stay in that phase for more samples than few do. g_k is the gain of the rule's outer step in
that block over its final gain, which it reaches after many blocks only (:mod:`paceline.rules.outer.gain`).

alpha is taken between `FIRST` and `LAST` of the samples, after the first steep fall and before usual schedules lower
the rate. k workers *pay* where their speed-up times E_k / k is k / 2 at least: each is then worth half a worker or
more.

Source: E_k is Kish's effective sample size (Survey Sampling, 1965), and with a noise scale B = 1/c - 1 the batch-size
law of McCandlish et al., arXiv 1812.06162, E_k = k (1 + B) / (k + B), by which each of about B workers, their critical
size, is worth a half. The power law is that of Hestness et al., arXiv 1712.00409, without a constant. Where we differ:
displacements of blocks in place of gradients, and X in place of samples.

The common part s includes what all workers do to undo the noise of the mean before, a share of |n|^2 / N. So E of few
workers understates E_k of many, most of all where the rate stays high: the forecast is then too cautious
(records/2026-11-23_quality_meter).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import linear_regression

import numpy as np
import numpy.typing as npt

from paceline.errors import RuleError
from paceline.rules.rule import Rule

FIRST, LAST = 1 / 16, 1 / 2
BINS, LEAST_BINS = 8, 3
"""Means of the loss over equal ratios of samples, to which alpha is fitted; so many need a value."""
MOST_STEPS = 1024
"""Of the integral of X; fewer where there are fewer blocks."""
LATE = 1 << 30
"""A block by which every gain is the final one."""

Points = npt.NDArray[np.float64]


def correlation(effective: float, workers: int) -> float:
    """c, from 0 (independent) to 1 (all alike).

    >>> correlation(2.5, 4)
    0.2
    """
    if workers < 2:
        raise RuleError(f"one worker has no other to compare with: give a run of at least 2, got {workers}")
    return (workers - effective) / (effective * (workers - 1))


def effective_of(correlation: float, workers: int) -> float:
    """E_k of k workers.

    >>> effective_of(0.2, 16)
    4.0
    """
    return workers / (1 + (workers - 1) * correlation)


@dataclass(frozen=True)
class ObservedRun:
    """A run from which others are forecast."""

    workers: int  # N; of an elastic run the most at any time
    minibatches: Points  # of all workers by the end of each block, rising, shape (blocks,)
    progress: Points  # X by then, of the same shape
    correlation: Points  # c in that block, of the same shape
    loss: float  # L_N
    alpha: float  # of the power law


@dataclass(frozen=True)
class Quality:
    """A forecast at equal samples."""

    workers: int  # k
    effective: float  # the mean of E_k over the run, as far as the outer step uses it: k X_k over the minibatches
    loss: float  # L_k


def fitted_alpha(minibatches: Points, progress: Points, losses: Points) -> float:
    """alpha, at least 0, of losses (points,) over both counts of minibatches, each of the same shape.

    Raises:
        RuleError: too few positive losses between `FIRST` and `LAST` of the minibatches.
    """
    edges = np.geomspace(FIRST, LAST, BINS + 1) * minibatches[-1]
    usable = np.isfinite(losses) & (losses > 0) & (progress > 0)
    rows = [usable & (minibatches >= low) & (minibatches < high) for low, high in pairwise(edges)]
    means = [(math.log(progress[row].mean()), math.log(losses[row].mean())) for row in rows if row.any()]
    if len(means) < LEAST_BINS:
        raise RuleError(
            f"the losses in {len(means)} of {BINS} parts of the run's first half are positive numbers, of which a "
            f"forecast needs {LEAST_BINS}: report the loss more often, with run.log(loss=...)"
        )
    return max(0.0, -linear_regression(*zip(*means, strict=True)).slope)


def forecast_quality(run: ObservedRun, workers: int, rule: Rule) -> Quality:
    """The forecast of k workers with the minibatches of the run, all workers together.

    Args:
        run: what was observed.
        workers: k, at least 1.
        rule: a rule with blocks.
    """
    whole = float(run.minibatches[-1])
    blocks = whole / (workers * rule.schedule.period)
    steps = max(1, min(MOST_STEPS, round(blocks)))
    used, found = gain_share(rule, workers), 0.0
    for step in range(steps):
        place = min(int(np.searchsorted(run.progress, found, side="right")), len(run.correlation) - 1)
        c = float(run.correlation[place])
        block = 1 + int(step * blocks / steps)
        found += whole / steps * min(effective_of(c, workers) / workers, used(block))
    loss = run.loss * float(run.progress[-1] / found) ** run.alpha
    return Quality(workers, workers * found / whole, loss)


def gain_share(rule: Rule, workers: int) -> Callable[[int], float]:
    """g_k by the number of a block, the first being 1."""

    def gain(block: int) -> float:
        numbers = rule.coefficients(block, workers, 0.0)
        return numbers.lr / (1 - numbers.momentum)

    last = gain(LATE)
    return lambda block: min(1.0, gain(block) / last) if workers > 1 else 1.0


def most_that_pay(worth: Callable[[int], float], most: int) -> int:
    """The most workers, up to `most`, that pay: `worth(k)` is k / 2 at least. `worth(k) / k` must not rise."""
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if worth(middle) >= middle / 2 else (low, middle)
    return low
