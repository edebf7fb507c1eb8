# SPDX-License-Identifier: Apache-2.0
"""A tensor's bits: their checksum, and a key by which two places see that they hold the same values."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor
from torch.nn import functional

KEY_CHARACTERS = 32
PIECE_BYTES_CPU, PIECE_BYTES_DEVICE = 1 << 20, 1 << 24
"""Bytes summed at a time: what stays in a cache, and what is worth a kernel's launch."""


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's numbers as bytes, in the order of its elements; a copy where it is not contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@torch.no_grad()
def checksum(tensor: Tensor) -> list[int]:
    """Two sums of a tensor's bits modulo 2^64, the same on every device; the second changes with the order, too."""
    flat = as_bytes(tensor)
    size = PIECE_BYTES_CPU if flat.device.type == "cpu" else PIECE_BYTES_DEVICE
    odd = torch.arange(size // 8, device=flat.device).mul_(2).add_(1)
    plain = torch.zeros((), dtype=torch.int64, device=flat.device)
    ordered = plain.clone()
    for begin in range(0, flat.numel(), size):
        piece = flat[begin : begin + size]
        if piece.numel() % 8 or piece.data_ptr() % 8:
            piece = functional.pad(piece, (0, -piece.numel() % 8)).clone()
        words = piece.view(torch.int64)
        words = words ^ words >> 32  # else a sign would count in the highest bit only
        total = words.sum()
        plain += total
        ordered += words.mul_(odd[: words.numel()]).sum() + 2 * (begin // 8) * total
    return [int(plain), int(ordered)]


def key(name: str, tensor: Tensor) -> str:
    """What a tensor of this name is known by: it changes with the values, the shape and the dtype."""
    about = [name, str(tensor.dtype), list(tensor.shape), checksum(tensor)]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:KEY_CHARACTERS]


def memory(tensor: Tensor) -> tuple[object, ...]:
    """What two tensors share that are one: the same place in memory, seen alike."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
