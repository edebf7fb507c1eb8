# SPDX-License-Identifier: Apache-2.0
"""The places of the k largest magnitudes, given the k-th, in two reads of the numbers.

The first pass counts in each part the numbers above the k-th and those equal to it; the second writes the places, in
rising order, where the counts of the parts before say. Of equals the first are taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _count(x, kth, above, equal, n, BLOCK: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    magnitude = tl.abs(tl.load(x + at, mask=at < n, other=0.0))
    least = tl.load(kth)
    tl.store(above + part, tl.sum(((magnitude > least) & (at < n)).to(tl.int64), axis=0))
    tl.store(equal + part, tl.sum(((magnitude == least) & (at < n)).to(tl.int64), axis=0))


@triton.jit
def _write(x, kth, above, equal, missing, places, n, k, BLOCK: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    magnitude = tl.abs(tl.load(x + at, mask=at < n, other=0.0))
    least = tl.load(kth)
    wanted = tl.load(missing)
    larger = ((magnitude > least) & (at < n)).to(tl.int64)
    same = ((magnitude == least) & (at < n)).to(tl.int64)
    larger_before = tl.load(above + part) + tl.cumsum(larger, axis=0) - larger
    same_before = tl.load(equal + part) + tl.cumsum(same, axis=0) - same
    chosen = (larger == 1) | ((same == 1) & (same_before < wanted))
    place = larger_before + tl.minimum(same_before, wanted)
    tl.store(places + place, at, mask=chosen & (place < k))


def places(x: Tensor, kth: Tensor, k: int) -> Tensor:
    """int64 (k,): where |x|, float32 (n,), is above `kth`, shape (), or one of the first that equal it."""
    n = x.numel()
    parts = triton.cdiv(n, BLOCK)
    above, equal = torch.zeros(2, parts, dtype=torch.int64, device=x.device)
    chosen = torch.zeros(k, dtype=torch.int64, device=x.device)  # with some nan among x, fewer than k are found
    with torch.cuda.device_of(x):
        _count[(parts,)](x, kth, above, equal, n, BLOCK=BLOCK)
        before = (above.cumsum(0) - above, equal.cumsum(0) - equal)
        _write[(parts,)](x, kth, *before, k - above.sum(), chosen, n, k, BLOCK=BLOCK)
    return chosen
