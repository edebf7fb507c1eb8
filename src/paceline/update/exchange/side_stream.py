# SPDX-License-Identifier: Apache-2.0
"""Where an exchange works on an accelerator: on a stream beside training, and in pinned host memory.

Training has queued what an exchange reads when the exchange starts, so the side stream waits for that (`fork`); from
then on both go on at once, and training waits for the side stream when it uses the result (`join`). Both waits are the
device's: the host goes on. NCCL's operations are waited for by the stream that asks, so on a side stream an exchange of
several operations can be queued whole. Exchanges take turns on a few streams: the result of one does not wait for those
that started after it. Where a back end takes host memory, only a thread of the pipeline waits for the copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

STREAMS = 3
"""As many as chunks on the wire at a time."""


class SideStream:
    """The stream of a CUDA device beside training, or, without one, nothing.

    Args:
        device: the device; None if exchanges work where training does.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device is not None else None  # type: ignore[no-untyped-call]

    @classmethod
    def beside(cls, devices: Iterable[torch.device]) -> list[SideStream]:
        """For a model on these devices: streams of its CUDA device, if it has one and no other."""
        found = set(devices)
        if len(found) == 1 and next(iter(found)).type == "cuda":
            return [cls(device) for device in found for _ in range(STREAMS)]
        return [cls()]

    @property
    def apart(self) -> bool:
        """Whether there is one."""
        return self._stream is not None

    def entered(self) -> AbstractContextManager[Any]:
        """Context in which this thread queues its work on it."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def fork(self) -> None:
        """What is queued on it from now on comes after what this thread has queued so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def join(self) -> None:
        """What this thread queues from now on comes after all that is queued on it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A copy of `x` on another device: complete, if that is the host's, else for this thread's stream.

    Between host and CUDA it goes through pinned memory, which torch keeps for the next ones; a copy to CUDA from other
    memory would let the host wait for all that is queued.
    """
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    if x.device.type != "cuda" or device.type != "cpu":
        return x.to(device)
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copy.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return copy
