# SPDX-License-Identifier: Apache-2.0
"""The outer steps with momentum, in one pass: three reads and three writes of a number in place of eight and five.

    b  <- m b + s d,     theta <- theta + p b + q d,     start = theta + r b

BMUF (b is Delta): m = eta, s = zeta A^p, p = 1, q = 0, r = eta of the next block. DiLoCo: m = mu, s = -1, p = -nu mu,
q = nu, and the start is theta. d is the mean displacement.

And a worker's contribution in one pass: the difference to the start of the block, and its norm.

    out = values - origin,      the origin rounded to the parameters' dtype first, where that has 16 bits

A sum of squares for each 4,096 numbers comes with it, added in one order whatever the device does; it is inf or nan
where a number is, so that the norm of these sums also says whether the contribution is finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
PART = 4096


@dataclass(frozen=True)
class Factors:
    """m, s, p, q and r of the equations above; r is None where the start is theta itself."""

    momentum: float
    scale: float
    of_momentum: float
    of_mean: float
    ahead: float | None = None


@triton.jit
def _step(theta, mean, b, start, n, m, s, p, q, r, MEAN: tl.constexpr, START: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    d = tl.load(mean + at, mask=inside)
    buffer = tl.fma(d, s, tl.load(b + at, mask=inside) * m)
    anchor = tl.load(theta + at, mask=inside)
    if MEAN:
        anchor = tl.fma(d, q, anchor)
    anchor = tl.fma(buffer, p, anchor)
    tl.store(b + at, buffer, mask=inside)
    tl.store(theta + at, anchor, mask=inside)
    if START:
        tl.store(start + at, tl.fma(buffer, r, anchor), mask=inside)


def step(theta: Tensor, mean: Tensor, b: Tensor, factors: Factors, out: Tensor) -> Tensor:
    """Apply `mean`, float32 (n,), to `theta` and `b` in place; the next start, in `out` unless it is theta."""
    starts, of_mean = factors.ahead is not None, factors.of_mean != 0
    start = out if starts else theta
    numbers = (factors.momentum, factors.scale, factors.of_momentum, factors.of_mean, factors.ahead or 0.0)
    n = theta.numel()
    with torch.cuda.device_of(theta):
        grid = (triton.cdiv(n, BLOCK),)
        _step[grid](theta, mean, b, start, n, *numbers, of_mean, starts, BLOCK=BLOCK, enable_fp_fusion=False)
    return start


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
    squares = torch.empty(triton.cdiv(n, PART), dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(out):
        grid = (len(squares),)
        _difference[grid](values, origin, out, squares, n, _BITS.get(dtype, 0), BLOCK=PART, enable_fp_fusion=False)
    return squares
