# SPDX-License-Identifier: Apache-2.0
"""Blocks of unequal length for machines of unequal speed: all end together, and a faster one brings more.

    n_i   = N tau v_i / sum_j v_j           minibatches of worker i in a block: the whole numbers that end first
    w_i   = n_i / sum_j n_j                 weight of its displacement, and of its optimizer's moments
    N_eff = (sum_i n_i)^2 / sum_i n_i^2     workers that the mean is worth: block momentum's gain follows them

v_i = 1 / c_i is worker i's speed, c_i the seconds of a minibatch. tau is the mean period, so a block holds N tau
minibatches as always.

Source: weights by samples, McMahan et al., arXiv 1602.05629 (federated averaging). Wang et al., 2007.07481 (FedNova),
show that unequal numbers of steps lead astray where workers' data differ; here all draw from one shuffled epoch. N_eff
is Kish's effective sample size (Survey Sampling, 1965). Periods by speed are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def periods(seconds: Sequence[float], period: int) -> tuple[int, ...]:
    """n_i.

    >>> periods([1.0, 1.0, 1.0, 5.0], 16)
    (20, 20, 20, 4)

    Args:
        seconds: c_i of each worker, above 0.
        period: tau.
    """
    total, speed = len(seconds) * period, sum(1 / one for one in seconds)
    found = [max(1, int(total / one / speed)) for one in seconds]
    while sum(found) < total:  # one more for who then ends first
        found[min(range(len(found)), key=lambda rank: (found[rank] + 1) * seconds[rank])] += 1
    return tuple(found)


def shortest(seconds: Sequence[float]) -> int:
    """The least period in which the slowest worker has a minibatch to make.

    >>> shortest([1.0, 1.0, 1.0, 5.0]), shortest([1.0, 1.0, 1.0, 10.0])
    (4, 8)
    """
    return math.ceil(max(seconds) * sum(1 / one for one in seconds) / len(seconds) - 1e-9)


def effective(made: Sequence[int]) -> float:
    """N_eff; N itself where all n_i are equal.

    >>> effective([16, 16]), round(effective([20, 20, 20, 4]), 2)
    (2.0, 3.37)
    """
    return sum(made) ** 2 / sum(one * one for one in made)


def gain(seconds: Sequence[float], present: Sequence[int], other: Sequence[int]) -> float:
    """How much faster minibatches are made in blocks of the `other` periods than in those of the `present` ones.

    >>> gain([1.0, 1.0, 1.0, 5.0], [16] * 4, [20, 20, 20, 4])
    4.0
    """
    now, then = (max(c * n for c, n in zip(seconds, some, strict=True)) / sum(some) for some in (present, other))
    return now / then
