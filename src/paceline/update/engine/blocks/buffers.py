# SPDX-License-Identifier: Apache-2.0
"""The outer state of a model's buffers: exported, never extrapolated.

Running statistics of normalisation layers are averaged. Of every other buffer all workers take rank 0's, as under
DistributedDataParallel: the mean of a queue, a mask or a pointer means nothing.

Running statistics keep an inf or nan of a bad batch, which would make the workers' mean invalid; so they are reset to
the last mean before an exchange. Other buffers may be infinite by intent: numbers that were finite are reset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.core.flat import Fragment, Modules, buffer_fragments
from paceline.core.world import World
from paceline.update.engine.blocks.numbers import BlockEnd
from paceline.update.engine.blocks.outer_state import OuterState
from paceline.update.exchange.checksum import fold
from paceline.update.exchange.header import ExchangeSummary

logger = logging.getLogger("paceline")


class BufferState(OuterState):
    """Floating-point running statistics, such as BatchNorm's: averaged."""

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
        """Reset to the last values that all took, if a number is inf or nan."""
        if self.device.type == "cpu":
            self.fragment.reset_nonfinite(self.anchor)
        else:  # the device decides by itself: the host reads nothing while work is queued
            now = self.fragment.whole(self.device)
            self.fragment.write(0, self.numel, self.fragment.without_nonfinite(now, self.anchor))

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

    def _next(self, begin: int, end: int, mean: Tensor) -> Tensor:
        start = self.anchor[begin:end].add_(mean)
        fold(self.checksum, start)
        return start

    def prepare(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        assert self.snapshot is not None
        torch.sub(self._next(begin, end, mean), self.snapshot[begin:end], out=self.snapshot[begin:end])

    def move(self, begin: int, end: int, made: int) -> None:
        OuterState.move(self, begin, end, made)


class CopiedState(BufferState):
    """Buffers of which all workers take rank 0's.

    Args:
        world: gives this worker among those that exchange.
    """

    def __init__(self, fragment: Fragment, device: torch.device | None, world: Callable[[], World]) -> None:
        super().__init__(fragment, device)
        self._world = world
        self._exchanges = 0
        self._named: set[str] = set()

    def weight(self, summary: ExchangeSummary) -> float:
        return 1.0

    def factor(self, factor: float, minibatches: int) -> float:
        return 1.0

    def _next(self, begin: int, end: int, mean: Tensor) -> Tensor:
        self._exchanges += begin == 0
        if self._exchanges & (self._exchanges - 1) == 0:  # the first, second, fourth, ..: it costs next to nothing
            self._compare(begin, end, mean)
        return super()._next(begin, end, mean)

    def move(self, begin: int, end: int, made: int) -> None:
        if self._world().rank:  # rank 0 goes on from its own
            self.fragment.write(begin, end, self.anchor[begin:end])

    def _compare(self, begin: int, end: int, taken: Tensor) -> None:
        """Say once of a floating-point buffer that this worker had another one."""
        world = self._world()
        if world.rank == 1:
            apart = names_apart(self.fragment, begin, self.values(begin, end), taken)
            say_apart(world, [name for name in apart if name not in self._named])
            self._named.update(apart)


def names_apart(fragment: Fragment, begin: int, own: Tensor, taken: Tensor) -> list[str]:
    """Which floating-point tensors of a fragment differ, from element `begin` on, from what was taken."""
    if not fragment.outer_dtype.is_floating_point:
        return []
    cuts = [(s.name, max(0, s.offset - begin), min(own.numel(), s.end - begin)) for s in fragment.slots]
    return [name for name, low, high in cuts if low < high and not torch.equal(own[low:high], taken[low:high])]


def say_apart(world: World, names: list[str]) -> None:
    """Say that these buffers are rank 0's."""
    if names:
        text = (
            "each worker writes its own values into buffers, and all take rank 0's, as under DistributedDataParallel: "
            f"{', '.join(names)}. Only running statistics of torch's BatchNorm and InstanceNorm are averaged"
        )
        logger.warning("%s", world.sign(text))


def buffer_states(model: Modules, device: torch.device | None, world: Callable[[], World]) -> list[BufferState]:
    """The outer states of the model's buffers, one for each kind, dtype and device."""
    return [_state_of(part, device, world) for part in buffer_fragments(model)]


def _state_of(part: Fragment, device: torch.device | None, world: Callable[[], World]) -> BufferState:
    if part.from_rank_0:
        return CopiedState(part, device, world)
    return (BufferState if part.outer_dtype.is_floating_point else CounterState)(part, device)
