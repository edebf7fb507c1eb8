# SPDX-License-Identifier: Apache-2.0
"""Bits of float32 numbers: signs in bytes, eight to one, and a choice between two levels.

NumPy packs on a CPU, without a copy, and shifts on an accelerator; both give the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def on_processor(x: Tensor) -> bool:
    """Whether NumPy can read the memory of `x`."""
    return x.device.type == "cpu"


def not_negative(x: Tensor) -> Tensor:
    """x >= 0 as 1 or 0, uint8, of the shape of `x`."""
    if not on_processor(x):
        return (x >= 0).view(torch.uint8)
    return torch.from_numpy(np.greater_equal(x.numpy(), 0).view(np.uint8))


def pack(flags: Tensor) -> Tensor:
    """Ones and zeros, uint8 (R, C), as bits (R, ceil(C/8)): the first is the highest bit, missing ones are 0."""
    return pack_numpy(flags) if on_processor(flags) else pack_shifts(flags)


def unpack(packed: Tensor, length: int) -> Tensor:
    """The ones and zeros, uint8 (R, length), of bits (R, ceil(length/8))."""
    return unpack_numpy(packed, length) if on_processor(packed) else unpack_shifts(packed, length)


def pack_numpy(flags: Tensor) -> Tensor:
    """`pack` on a CPU."""
    rows, length = flags.shape
    if length % 8 == 0:  # one long row is faster than many short ones
        return torch.from_numpy(np.packbits(flags.numpy().reshape(-1)).reshape(rows, -1))
    return torch.from_numpy(np.packbits(flags.numpy(), axis=1))


def unpack_numpy(packed: Tensor, length: int) -> Tensor:
    """`unpack` on a CPU."""
    if length % 8 == 0:
        return torch.from_numpy(np.unpackbits(packed.numpy().reshape(-1)).reshape(-1, length))
    return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, count=length))


def pack_shifts(flags: Tensor) -> Tensor:
    """`pack` in torch operations."""
    rows, length = flags.shape
    flags = torch.nn.functional.pad(flags, (0, -length % 8)).view(rows, -1, 8)
    return (flags << _places(flags.device)).sum(2, dtype=torch.uint8)


def unpack_shifts(packed: Tensor, length: int) -> Tensor:
    """`unpack` in torch operations."""
    flags = (packed.unsqueeze(2) >> _places(packed.device)) & 1
    return flags.view(len(packed), -1)[:, :length]


def _places(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def choose(flags: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """`high` where the flag is 1, else `low`, float32 (R, C); flags uint8 (R, C), levels (R, 1).

    Computed as low ^ flag (high ^ low), much faster than `torch.where` on a CPU.
    """
    low_bits = low.contiguous().view(torch.int32)
    differ = high.contiguous().view(torch.int32) ^ low_bits
    return flags.to(torch.int32).mul_(differ).bitwise_xor_(low_bits).view(torch.float32)


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """table[codes]: float32 (R, C k) for a table of shape (256, k) and codes uint8 (R, C)."""
    rows = len(codes)
    if not on_processor(codes):
        return _copy_on(table, codes.device)[codes.to(torch.int32)].view(rows, -1)
    values = np.take(table.numpy().view(np.int64).reshape(-1), codes.numpy(), mode="clip")
    return torch.from_numpy(values.view(np.float32)).view(rows, -1)


@lru_cache(maxsize=16)
def _copy_on(table: Tensor, device: torch.device) -> Tensor:
    """The table on an accelerator; copied once, because a copy waits for all that is queued there."""
    return table.to(device)
