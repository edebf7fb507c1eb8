# SPDX-License-Identifier: Apache-2.0
"""How long the synchronous steps of a probe take on one worker, by the wall clock or by the simulated one.

In the first half of a probe gradients are exchanged after the backward pass, in the second half during it:

    c = the computing time of a step of the first half
    e = the exchange's time in the first half, without waiting for other workers
    x = the time of an exchange that is left in the second half, and what computing has slowed down by beyond 5 %

medians, and the first step of each half does not count. Medians of so few steps differ by 5 % without a cause.

Under a simulated clock an exchange is taken for a ring as in :mod:`.timers`, and what the backward pass, two thirds of
a step, leaves of it is that of evenly spaced chunks:

    x = max(e / C, e - (1 - 1/C) (2/3) c)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from paceline.communication.base import CompletedOperation
from paceline.communication.virtual.clock import Clock
from paceline.rules.choice import BACKWARD
from paceline.rules.codec import Layout, Steps, codec_from_text
from paceline.tuning.timers import ring_s

SLOWER = 1.05
SAMPLE = 1 << 20
"""Elements on which a codec is timed."""

StepTimes = tuple[float, float, float | None]
"""(c, e, x), seconds; x is None before the second half is over."""


class ProbeTimer(Protocol):
    """Measures the steps of a probe on one worker."""

    def stepped(self, steps: int) -> None:
        """A step of the probe was made, of which this worker has made `steps`."""

    def measured(self) -> StepTimes | None:
        """The times; None before the first half is over."""

    @property
    def early(self) -> bool:
        """Whether gradients are exchanged during the next backward pass."""

    def codec_s(self, codec: str, elements: int) -> float:
        """Seconds in which this worker writes and reads so many numbers."""


class WallProbeTimer:
    """By the wall clock.

    Args:
        spent: total seconds of computing, of waiting for other workers, and of exchanging, up to the last exchange;
            the monitor updates this list in place.
        steps: of the probe.
        device: of the model, on which codecs are timed.
    """

    def __init__(self, spent: Sequence[float], steps: int, device: torch.device) -> None:
        self._spent, self._half, self._steps, self._device = spent, steps // 2, steps, device
        self._before = list(spent)
        self._rows: list[tuple[float, float]] = []

    def stepped(self, steps: int) -> None:
        now = list(self._spent)
        computed_s, _, exchanged_s = (after - was for after, was in zip(now, self._before, strict=True))
        self._before = now
        self._rows.append((computed_s, exchanged_s))

    @property
    def early(self) -> bool:
        return len(self._rows) >= self._half

    def measured(self) -> StepTimes | None:
        if len(self._rows) < self._half:
            return None
        after, during = self._rows[1 : self._half], self._rows[self._half + 1 :]
        step_s, exchange_s = median(c for c, _ in after), median(e for _, e in after)
        if len(self._rows) < self._steps:
            return step_s, exchange_s, None
        slower_s = median(c for c, _ in during) - SLOWER * step_s
        return step_s, exchange_s, median(e for _, e in during) + max(0.0, slower_s)

    def codec_s(self, codec: str, elements: int) -> float:
        size = min(elements, SAMPLE)
        return min(_seconds_of(codec, size, self._device) for _ in range(2)) * elements / max(1, size)


class SimulatedProbeTimer:
    """By the simulated clock; a function of the clock and of the count of steps alone.

    Args:
        clock: the cluster's.
        rank: this worker.
        workers: N.
        nbytes: that this worker sends in an exchange of gradients.
        chunks: C.
        steps: of the probe.
    """

    def __init__(self, clock: Clock, rank: int, workers: int, nbytes: int, chunks: int, steps: int) -> None:
        self._clock, self._rank, self._workers, self._nbytes = clock, rank, workers, nbytes
        self._chunks, self._half, self._probe = chunks, steps // 2, steps
        self._made = self._steps = 0

    def stepped(self, steps: int) -> None:
        self._made, self._steps = self._made + 1, steps

    def resumed(self, made: int, steps: int) -> None:
        """Continue after `made` steps of the probe, and `steps` of this worker."""
        self._made, self._steps = made, steps

    @property
    def early(self) -> bool:
        return self._made >= self._half

    def measured(self) -> StepTimes | None:
        if self._made < self._half:
            return None
        step_s = median(
            self._clock.compute_s(self._rank, step) for step in range(self._steps - self._half, self._steps)
        )
        gradient_s = ring_s(self._clock, self._rank, self._workers, self._nbytes, self._steps)
        if self._made < self._probe:
            return step_s, gradient_s, None
        return step_s, gradient_s, exposed_s(gradient_s, self._chunks, step_s)

    def codec_s(self, codec: str, elements: int) -> float:
        """None: the simulated clock has no codecs."""
        return 0.0


def exposed_s(gradient_s: float, chunks: int, step_s: float) -> float:
    """x, what the backward pass leaves of an exchange of gradients in evenly spaced chunks."""
    return max(gradient_s / chunks, gradient_s - (1 - 1 / chunks) * BACKWARD * step_s)


class _Pair:
    """A wire between two workers that carries nothing."""

    rank, size = 0, 2

    def sum(self, x: Tensor) -> Steps[None]:
        yield CompletedOperation()

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int]) -> CompletedOperation:
        out.zero_()
        return CompletedOperation()

    def space(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=device)


def _seconds_of(codec: str, elements: int, device: torch.device) -> float:
    """Seconds of one exchange of so many numbers among two workers, without the wire."""
    x = torch.full((elements,), 1e-3, device=device)
    float(x[0])
    began = time.perf_counter()
    for _ in codec_from_text(codec).exchange(x, Layout.vector(elements), _Pair(), {}):
        pass
    float(x[0])  # waits for queued kernels
    return time.perf_counter() - began
