# SPDX-License-Identifier: Apache-2.0
"""The quantisers 1-bit and int8 in one kernel each way.

    encode:   v = x + r,   codes and levels of Q(v),   x <- v - Q(v)          decode:   total <- total + Q(v)

Q is that of :mod:`paceline.rules.codec.one_bit` or :mod:`paceline.rules.codec.int8`. A program has a group, a row of
`x`. The levels of 1-bit are sums in the kernel's own order, which may round otherwise
than torch's: workers use the levels that came on the wire. All else has the bits of torch's lines.

The places of the k largest magnitudes, given the k-th, come in two reads of the numbers: the first counts in each part
those above the k-th and those equal to it; the second writes the places, in rising order, where the counts of the parts
before say. Of equals the first are taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
MAGIC = 12_582_912.0  # 1.5 * 2^23: a number below 2^22 plus this, minus this, is rounded to the nearest, ties to even
BYTES = 512  # bytes of bits at a time
PART = 4096  # numbers of which a program finds the largest


@triton.jit
def _bounded(x, largest: tl.constexpr):
    """x from -largest to largest; a nan stays."""
    x = tl.where(x > largest, largest, x)
    return tl.where(x < -largest, -largest, x)


@triton.jit
def _given(x, residual, at, inside, FEEDBACK: tl.constexpr):
    v = tl.load(x + at, mask=inside, other=0.0)
    if FEEDBACK:
        v += tl.load(residual + at, mask=inside, other=0.0)
    return v


@triton.jit
def _one_bit(
    x, residual, codes, levels, length, width, FEEDBACK: tl.constexpr, BYTES: tl.constexpr, largest: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x += row * length
    residual += row * length
    byte = tl.arange(0, BYTES)[:, None]
    bit = tl.arange(0, 8)[None, :]
    ones = tl.zeros((BYTES, 8), dtype=tl.int32)
    above = tl.zeros((BYTES, 8), dtype=tl.float32)
    below = tl.zeros((BYTES, 8), dtype=tl.float32)
    for begin in range(0, length, BYTES * 8):
        at = begin + byte * 8 + bit
        inside = at < length
        v = _given(x, residual, at, inside, FEEDBACK)
        ones += ((v >= 0) & inside).to(tl.int32)
        above += tl.where(v < 0, 0.0, v)
        below += tl.where(v >= 0, 0.0, v)
    positive = tl.sum(tl.sum(ones, axis=1), axis=0)
    high = _bounded(tl.div_rn(tl.sum(tl.sum(above, axis=1), axis=0), tl.maximum(positive, 1).to(tl.float32)), largest)
    zeros = tl.maximum(length - positive, 1).to(tl.float32)
    low = _bounded(tl.div_rn(tl.sum(tl.sum(below, axis=1), axis=0), zeros), largest)
    tl.store(levels + 2 * row, high)
    tl.store(levels + 2 * row + 1, low)
    for begin in range(0, length, BYTES * 8):
        at = begin + byte * 8 + bit
        inside = at < length
        v = _given(x, residual, at, inside, FEEDBACK)
        flag = (v >= 0) & inside
        tl.store(x + at, v - tl.where(flag, high, low), mask=inside)
        packed = tl.sum(flag.to(tl.int32) << (7 - bit), axis=1)
        place = begin // 8 + tl.arange(0, BYTES)
        tl.store(codes + row * width + place, packed.to(tl.uint8), mask=place < width)


@triton.jit
def _add_one_bit(total, codes, levels, length, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    high = tl.load(levels + 2 * row)
    low = tl.load(levels + 2 * row + 1)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < length
        byte = tl.load(codes + row * width + at // 8, mask=inside, other=0).to(tl.int32)
        flag = (byte >> (7 - at % 8)) & 1
        v = tl.load(total + row * length + at, mask=inside) + tl.where(flag == 1, high, low)
        tl.store(total + row * length + at, v, mask=inside)


@triton.jit
def _int8(
    x,
    residual,
    codes,
    levels,
    length,
    FEEDBACK: tl.constexpr,
    BLOCK: tl.constexpr,
    largest: tl.constexpr,
    magic: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < length
    place = row * length + at
    v = _given(x, residual, place, inside, FEEDBACK)
    magnitude = tl.abs(v)
    scale = tl.div_rn(tl.max(magnitude, axis=0), 127.0)
    scale = tl.where(scale > largest, largest, scale)
    scale += tl.sum(tl.where(v != v, v, 0.0), axis=0)  # nan if one is: a maximum may ignore it
    tl.store(levels + row, scale)
    q = tl.div_rn(v, tl.where(scale == 0, 1.0, scale))
    q = tl.where(q > 127.0, 127.0, tl.where(q < -127.0, -127.0, q))
    q = (q + magic) - magic
    tl.store(codes + place, tl.where(q != q, 0.0, q).to(tl.int8), mask=inside)
    tl.store(x + place, v - q * scale, mask=inside)


@triton.jit
def _add_int8(total, codes, levels, length, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < length
    place = row * length + at
    value = tl.load(codes + place, mask=inside, other=0).to(tl.float32) * tl.load(levels + row)
    tl.store(total + place, tl.load(total + place, mask=inside) + value, mask=inside)


def encode_one_bit(x: Tensor, residual: Tensor | None, codes: Tensor, levels: Tensor) -> None:
    """x <- v - Q(v), float32 (R, C); signs into `codes`, uint8 (R, ceil(C/8)), high and low into `levels`, (R, 2)."""
    (rows, length), width = x.shape, codes.shape[1]
    feedback, given = residual is not None, x if residual is None else residual
    with torch.cuda.device_of(x):
        _one_bit[(rows,)](
            x, given, codes, levels, length, width, feedback, BYTES=BYTES, largest=LARGEST, enable_fp_fusion=False
        )


def add_one_bit(total: Tensor, codes: Tensor, levels: Tensor) -> None:
    """total <- total + Q, float32 (R, C)."""
    rows, length = total.shape
    with torch.cuda.device_of(total):
        _add_one_bit[(rows,)](total, codes, levels, length, codes.shape[1], BLOCK=8 * BYTES, enable_fp_fusion=False)


def encode_int8(x: Tensor, residual: Tensor | None, codes: Tensor, levels: Tensor) -> None:
    """x <- v - Q(v), float32 (R, C), C at most a few thousand; q into `codes`, uint8, s into `levels`, (R, 1)."""
    rows, length = x.shape
    feedback, given = residual is not None, x if residual is None else residual
    block = triton.next_power_of_2(length)
    with torch.cuda.device_of(x):
        _int8[(rows,)](
            x,
            given,
            codes.view(torch.int8),
            levels,
            length,
            feedback,
            BLOCK=block,
            largest=LARGEST / 128,
            magic=MAGIC,
            enable_fp_fusion=False,
        )


def add_int8(total: Tensor, codes: Tensor, levels: Tensor) -> None:
    """total <- total + s q, float32 (R, C)."""
    rows, length = total.shape
    block = triton.next_power_of_2(length)
    with torch.cuda.device_of(total):
        _add_int8[(rows,)](total, codes.view(torch.int8), levels, length, BLOCK=block, enable_fp_fusion=False)


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
    parts = triton.cdiv(n, PART)
    above, equal = torch.zeros(2, parts, dtype=torch.int64, device=x.device)
    chosen = torch.zeros(k, dtype=torch.int64, device=x.device)  # with some nan among x, fewer than k are found
    with torch.cuda.device_of(x):
        _count[(parts,)](x, kth, above, equal, n, BLOCK=PART)
        before = (above.cumsum(0) - above, equal.cumsum(0) - equal)
        _write[(parts,)](x, kth, *before, k - above.sum(), chosen, n, k, BLOCK=PART)
    return chosen
