# SPDX-License-Identifier: Apache-2.0
"""A copy of a worker's state in host memory, made as fast as memory allows; the memory is reused."""

from __future__ import annotations

import torch
from torch import Tensor


class Snapshot:
    """Host memory for one copy; the next copy overwrites it.

    For CUDA tensors it is pinned, so that copies run concurrently at the bus's full rate.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies under the same names, contiguous, each in memory of its own; valid until the next call."""
        taken = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        devices = set()
        for name, tensor in tensors.items():
            taken[name].copy_(tensor.detach(), non_blocking=True)
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self._buffers = taken
        return dict(taken)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        pinned = like.device.type == "cuda"
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype or buffer.is_pinned() != pinned:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
        return buffer
