# SPDX-License-Identifier: Apache-2.0
"""Checksums of exchanged state, by which workers detect that their copies differ."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.core.flat import Fragment, flat_view

_PRIME = 1_000_003


def is_sampled(exchange: int) -> bool:
    """Whether parameters are compared after an exchange where that takes time: the first 8, and each eighth."""
    return exchange <= 8 or exchange % 8 == 0


def combine(sums: Iterable[Tensor]) -> int:
    """The checksums of several parts as one number that fits a header's field."""
    total, parts = 0, list(sums)
    if len({part.device for part in parts}) == 1:
        parts = torch.stack(parts).tolist()  # an accelerator is waited for once
    for part in parts:
        total = (total * 31 + int(part)) & (2**62 - 1)
    return total


def of_tensors(fragment: Fragment) -> Tensor:
    """The checksum of a fragment's tensors as they are, int64, shape ()."""
    fragment.refresh()
    total = torch.zeros((), dtype=torch.int64, device=fragment.device)
    for name, tensor in zip(fragment.names, fragment.tensors, strict=True):
        fold(total, flat_view(name, tensor))
    return total


def fold(accumulated: Tensor, block: Tensor) -> Tensor:
    """Fold a block's bits into a running checksum, both on the block's device.

    The block is read as integers and summed modulo 2^64: one pass at the speed of memory, and any single change shows.

    Args:
        accumulated: int64, shape ().
        block: any dtype, shape (n,), contiguous.
    """
    wide = block.numel() * block.element_size() % 8 == 0 and block.data_ptr() % 8 == 0
    words = block.view(torch.int64 if wide else torch.int32 if block.element_size() >= 4 else torch.int8)
    return torch.add(words.sum(dtype=torch.int64), accumulated, alpha=_PRIME, out=accumulated)
