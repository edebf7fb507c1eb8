# SPDX-License-Identifier: Apache-2.0
"""Host copies of tensors for transports that send host memory, and sums in rank order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def flat(x: Tensor) -> Tensor:
    """A one-dimensional view of a contiguous host tensor: the same memory, without autograd."""
    if not x.numel():
        return torch.empty(0, dtype=x.dtype)
    return torch.from_numpy(x.detach().reshape(-1).view(torch.uint8).numpy()).view(x.dtype)


def staged(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """The elements of `x`, one-dimensional in host memory, and a function that copies them back if that is a copy."""
    if x.device.type == "cpu" and x.is_contiguous():
        return flat(x), lambda: None
    copy = flat(x.detach().cpu().contiguous().clone())
    return copy, lambda: put(x, copy)


def put(place: Tensor, elements: Tensor) -> None:
    """Copy one-dimensional `elements` into `place`, of any shape and device."""
    place.detach().copy_(elements.view(place.shape))


def ordered_sum(rows: Tensor) -> Tensor:
    """The sum of the rows, in their order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total
