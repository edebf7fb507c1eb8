# SPDX-License-Identifier: Apache-2.0
"""A worker's contribution in one pass: the difference to the start of the block, and its norm.

    out = values - origin,      the origin rounded to the parameters' dtype first, where that has 16 bits

A sum of squares for each 4,096 numbers comes with it, added in one order whatever the device does; it is inf or nan
where a number is, so that the norm of these sums also tells whether the contribution is finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _to_bf16(x):
    """The nearest number of bfloat16, ties to even, as float32; x is finite."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _difference(values, origin, out, squares, n, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    begin = tl.load(origin + at, mask=inside, other=0.0)
    if ROUND == 16:
        begin = begin.to(tl.float16).to(tl.float32)
    elif ROUND == -16:
        begin = _to_bf16(begin)
    difference = tl.load(values + at, mask=inside, other=0.0).to(tl.float32) - begin
    tl.store(out + at, difference, mask=inside)
    tl.store(squares + part, tl.sum(difference * difference, axis=0))


_BITS = {torch.float16: 16, torch.bfloat16: -16}


def difference(values: Tensor, origin: Tensor, dtype: torch.dtype, out: Tensor) -> Tensor:
    """Write values - origin into `out`, all of shape (n,); returns the sums of squares, shape (ceil(n/4096),).

    Args:
        values: the parameters, float32, float16 or bfloat16.
        origin: the start of the block, float32.
        dtype: of the parameters, to which the origin is rounded.
        out: float32; may be the memory of `origin`.
    """
    n = out.numel()
    squares = torch.empty(triton.cdiv(n, BLOCK), dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(out):
        grid = (len(squares),)
        _difference[grid](values, origin, out, squares, n, _BITS.get(dtype, 0), BLOCK=BLOCK, enable_fp_fusion=False)
    return squares
