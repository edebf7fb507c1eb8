# SPDX-License-Identifier: Apache-2.0
"""The outer steps with momentum, in one pass: three reads and three writes of a number in place of eight and five.

    b  <- m b + s d,     theta <- theta + p b + q d,     start = theta + r b

BMUF (b is Delta): m = eta, s = zeta A^p, p = 1, q = 0, r = eta of the next block. DiLoCo: m = mu, s = -1, p = -nu mu,
q = nu, and the start is theta. d is the mean displacement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


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
