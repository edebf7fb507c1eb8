# SPDX-License-Identifier: Apache-2.0
"""The outer state of a model's buffers: averaged and exported, never extrapolated.

Running statistics keep an inf or nan of a bad batch, which would make the workers' mean invalid; so they are reset to
the last mean before an exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.flat import Fragment, Modules, averaged_buffers, find_buffers, fragments
from paceline.update.engine.blocks.numbers import BlockEnd
from paceline.update.engine.blocks.outer_state import OuterState
from paceline.update.exchange.checksum import fold
from paceline.update.exchange.header import ExchangeSummary


class BufferState(OuterState):
    """Floating-point buffers, such as BatchNorm's: averaged and exported, never extrapolated."""

    def __init__(self, fragment: Fragment, device: torch.device | None) -> None:
        super().__init__(fragment, device)
        self.anchor = fragment.whole(self.device)

    @property
    def exported(self) -> Tensor:
        """The global values."""
        return self.anchor

    def contribute(self, begin: int, end: int, out: Tensor) -> None:
        out.copy_(self.values(begin, end))

    def apply(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        self.fragment.write(begin, end, self._next(begin, end, mean))

    def show(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        self.fragment.write(begin, end, mean)

    def _next(self, begin: int, end: int, mean: Tensor) -> Tensor:
        """Update and return the global values."""
        start = self.anchor[begin:end].copy_(mean)
        fold(self.checksum, start)
        return start

    def prepare(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        self._next(begin, end, mean)

    def move(self, begin: int, end: int, made: int) -> None:
        now = self.fragment.read(begin, end, self.scratch(3, end - begin))
        self.fragment.write(begin, end, torch.lerp(self.anchor[begin:end], now, 0.5))

    def capture(self) -> None:
        self.anchor.copy_(self.fragment.whole(self.device))

    def restore(self) -> None:
        self.fragment.write(0, self.numel, self.anchor)

    def reset_nonfinite(self) -> None:
        """Reset to the last mean, if a number is inf or nan."""
        if self.device.type != "cpu":  # the device decides by itself: the host reads nothing while work is queued
            now = self.fragment.whole(self.device)
            self.fragment.write(0, self.numel, torch.where(torch.isfinite(now).all(), now, self.anchor))
        elif not self.fragment.finite():
            self.restore()

    def state(self) -> dict[str, Tensor]:
        return {"anchor": self.anchor}


class CounterState(BufferState):
    """Integer buffers, such as BatchNorm's count of batches: the mean of the workers' increments."""

    def weight(self, summary: ExchangeSummary) -> float:
        return float(sum(summary.minibatches))

    def factor(self, factor: float, minibatches: int) -> float:
        return float(minibatches) if factor else 0.0

    def contribute(self, begin: int, end: int, out: Tensor) -> None:
        torch.sub(self.values(begin, end), self.anchor[begin:end], out=out)

    def show(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        self.fragment.write(begin, end, self.anchor[begin:end] + mean)

    def _next(self, begin: int, end: int, mean: Tensor) -> Tensor:
        start = self.anchor[begin:end].add_(mean)
        fold(self.checksum, start)
        return start

    def prepare(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        assert self.snapshot is not None
        torch.sub(self._next(begin, end, mean), self.snapshot[begin:end], out=self.snapshot[begin:end])

    def move(self, begin: int, end: int, made: int) -> None:
        OuterState.move(self, begin, end, made)


def buffer_states(model: Modules, device: torch.device | None) -> list[BufferState]:
    """The outer states of the model's buffers, one for each dtype and device."""
    parts = fragments("buffers", averaged_buffers(model), find_buffers(model))
    return [(BufferState if p.outer_dtype.is_floating_point else CounterState)(p, device) for p in parts]
