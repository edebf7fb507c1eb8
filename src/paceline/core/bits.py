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
    """Three sums of a tensor's bits modulo 2^64, the same on every device; the last changes with the order, too.

    Sums of many equal numbers lose their high bits, which are all that differs between two constants of 64 bits. So the
    second and third sum have what is high in the low bits as well.
    """
    flat = as_bytes(tensor)
    size = PIECE_BYTES_CPU if flat.device.type == "cpu" else PIECE_BYTES_DEVICE
    odd = torch.arange(size // 8, device=flat.device).mul_(2).add_(1)
    sums = torch.zeros(3, dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), size):
        piece = flat[begin : begin + size]
        if piece.numel() % 8 or piece.data_ptr() % 8:
            piece = functional.pad(piece, (0, -piece.numel() % 8)).clone()
        words = piece.view(torch.int64)
        mixed = (words >> 29).bitwise_xor_(words)
        plain, total = words.sum(), mixed.sum()
        ordered = mixed.mul_(odd[: words.numel()]).sum() + 2 * (begin // 8) * total
        sums += torch.stack((plain, total, ordered))
    numbers: list[int] = sums.tolist()
    return numbers


def key(name: str, tensor: Tensor) -> str:
    """What a tensor of this name is known by: it changes with the values, the shape and the dtype."""
    about = [name, str(tensor.dtype), list(tensor.shape), checksum(tensor)]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:KEY_CHARACTERS]


def memory(tensor: Tensor) -> tuple[object, ...]:
    """What two tensors share that are one: the same place in memory, seen alike."""
    if not is_plain(tensor) or not tensor.numel():
        return (id(tensor),)
    seen = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), *seen


def is_plain(tensor: Tensor) -> bool:
    """Whether its numbers lie in one memory, and not in those of the parts of a subclass or a sparse layout."""
    return tensor.layout == torch.strided and type(tensor.data) is Tensor
