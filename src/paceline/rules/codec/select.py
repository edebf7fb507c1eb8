# SPDX-License-Identifier: Apache-2.0
"""The k largest magnitudes of a long tensor, exactly, in little more than one pass.

A sample of every 61st number gives a threshold that somewhat more than k numbers should exceed; only these are
compared. If fewer than k do, all numbers are compared. The result does not depend on the sample.

On an accelerator all numbers are compared at once: how many exceed a threshold is a value, for which the host would
have to wait, and k is none.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.core import kernels
from paceline.rules.codec.bits import on_processor

_STEP = 61  # odd, so that it reaches every column of the usual matrices
_SMALL = 1 << 14
_BLOCK = 1 << 17


def largest(x: Tensor, k: int) -> Tensor:
    """Places of the `k` largest |x_m|, x of shape (n,), in rising order, int64; of equal ones the first."""
    if k >= x.numel():
        return torch.arange(x.numel(), device=x.device)
    if not on_processor(x):
        return _k_largest_of_all(x, k)
    candidates = _above(x, _threshold(x, k)) if x.numel() > _SMALL else None
    if candidates is None or len(candidates) < k:
        candidates = torch.arange(x.numel(), device=x.device)
    magnitudes = x[candidates].abs_()
    return candidates[_chosen(magnitudes, _kth(magnitudes, k), k)]


def _threshold(x: Tensor, k: int) -> float:
    """A magnitude that probably k numbers, but not many more, reach."""
    sample = x[::_STEP].abs()
    share = k / x.numel()
    expected = share * sample.numel()
    place = min(sample.numel(), int(1.1 * expected + 4 * expected**0.5) + 1)
    return float(_kth(sample, place))


def _kth(magnitudes: Tensor, k: int) -> Tensor:
    """The k-th largest (the first is 1)."""
    place = magnitudes.numel() - k
    return torch.from_numpy(np.partition(magnitudes.numpy(), place))[place]


def _above(x: Tensor, threshold: float) -> Tensor:
    """Places where |x| >= threshold."""
    places = []
    for begin in range(0, x.numel(), _BLOCK):
        magnitudes = x[begin : begin + _BLOCK].abs().numpy()
        places.append(np.flatnonzero(magnitudes >= magnitudes.dtype.type(threshold)) + begin)
    return torch.from_numpy(np.concatenate(places))


def _chosen(magnitudes: Tensor, kth: Tensor, k: int) -> Tensor:
    """Which are the k largest: all above the k-th largest, and as many of its equals as are missing."""
    above, equal = magnitudes > kth, magnitudes == kth
    return above | (equal & (equal.cumsum(0) <= k - above.sum()))


def _k_largest_of_all(x: Tensor, k: int) -> Tensor:
    """The same of |x| without a value that the host reads. Some nan in x gives k places all the same."""
    magnitudes = x.abs()
    kth = torch.topk(magnitudes, k, sorted=False).values.amin()
    if kernels.serve(x):
        from paceline.core.kernels.codecs import places

        return places(x, kth, k)
    chosen = _chosen(magnitudes, kth, k)
    turn = torch.where(chosen, chosen.cumsum(0) - 1, k)  # those that are not chosen share one place too many
    every = torch.arange(magnitudes.numel(), device=magnitudes.device)
    return torch.zeros(k + 1, dtype=torch.int64, device=magnitudes.device).scatter_(0, turn, every)[:k]
