# SPDX-License-Identifier: Apache-2.0
"""Diversity of the workers' displacements: how many workers the N are worth, and a stronger step where they differ.

    a_n = mean_i |d_{i,n}| / |mean_i d_{i,n}|             of block n; from 1 (all alike) to root N (independent)
    A_n = c A_{n-1} + (1 - c) a_n                         c = 0.8, A_1 = a_1
    E_n = A_n^2                                           effective workers, from 1 to N
    d_n <- A_{n-1}^p d_n                                  amplification, before the outer step; A_0 = 1

d_{i,n} is worker i's displacement in block n, |.| the Euclidean norm over all parameters. Where all displacements are
alike, one worker would have moved alike; where they are independent, their mean is root N shorter than each of them.
The amplification gives back a part p of that. It follows the blocks before, so that each part of a block can be applied
as it arrives. Where N falls, A is cut to the new root N, which no a_n of so many workers can exceed.

Source: Yin et al., arXiv 1706.05699, call sum_i |g_i|^2 / |sum_i g_i|^2 the diversity of gradients; N times that, of
displacements, is about a_n^2. Decoupled DiLoCo, arXiv 2604.21428, takes p = 1 for each tensor, in place of block
momentum. Where we differ: one smoothed factor for the whole model, with p = 0.5 and block momentum after it.
"""

from __future__ import annotations

import math

KEEP = 0.8
"""c."""


def ratio(mean_norm: float, norm_of_mean: float, workers: int) -> float:
    """a_n.

    Args:
        mean_norm: mean of the norms of the workers' displacements.
        norm_of_mean: norm of their mean.
        workers: N, those that brought a displacement.

    Returns:
        1 where there is nothing to compare.
    """
    if not (mean_norm > 0 and norm_of_mean > 0 and math.isfinite(mean_norm) and math.isfinite(norm_of_mean)):
        return 1.0
    return min(max(1.0, mean_norm / norm_of_mean), math.sqrt(workers))


def smoothed(before: float | None, now: float) -> float:
    """A_n from A_{n-1} (None before the first block) and a_n."""
    return now if before is None else KEEP * before + (1 - KEEP) * now


def effective_workers(diversity: float) -> float:
    """E_n from A_n."""
    return diversity**2
