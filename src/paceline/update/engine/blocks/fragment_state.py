# SPDX-License-Identifier: Apache-2.0
"""The outer state of one fragment of the model: its parameters, buffers and moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.core.flat import Modules, all_finite, fragments
from paceline.core.world import World
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.buffers import buffer_states
from paceline.update.engine.blocks.local_optimizers import LocalOptimizers
from paceline.update.engine.blocks.moments import MomentState, moment_states
from paceline.update.engine.blocks.numbers import BlockNumbers
from paceline.update.engine.blocks.outer_state import OuterState, Packing, ParameterState, measure
from paceline.update.exchange.checksum import combine, fold


class FragmentState:
    """All outer states of one fragment.

    Args:
        rule: the rule.
        model: the user's modules, for their buffers; None if another fragment holds these.
        optimizers: the fragment's.
        numbers: of its blocks.
        device: of the outer state; None for the tensors' own device.
        mixes_at_once: whether the rule's mixing also applies to exchanges without overlap.
        world: gives this worker among those that exchange.

    Attributes:
        all: of parameters, buffers and moments, in this order.
        moments: created once the optimizers have state; None before.
    """

    all: list[OuterState]
    moments: list[MomentState] | None

    def __init__(
        self,
        rule: Rule,
        model: Modules | None,
        optimizers: LocalOptimizers,
        numbers: BlockNumbers,
        device: torch.device | None,
        mixes_at_once: bool,
        world: Callable[[], World],
    ) -> None:
        self._optimizers, self._device = optimizers, device
        everything = [pair for _, named in optimizers.owned for pair in named]
        self.parameters = [
            ParameterState(fragment, rule.merging, numbers, device, rule.payload.mixing, mixes_at_once)
            for fragment in fragments("parameters", everything)
        ]
        self.buffers = buffer_states(model, device, world) if model is not None else []
        self.drop_moments()
        if optimizers.have_state:  # from before attach
            self.make_moments()

    def make_moments(self) -> None:
        """Create the outer state of the moments, once the optimizers have state."""
        self.moments = moment_states(self._optimizers, self._device)
        self.all = [*self.averaged, *self.moments]

    def drop_moments(self) -> None:
        """Drop the outer state of the moments."""
        self.moments = None
        self.all = [*self.averaged]

    @property
    def averaged(self) -> Sequence[OuterState]:
        """The outer states of parameters and buffers, which exist before the optimizers have state."""
        return [*self.parameters, *self.buffers]

    def tensors(self) -> dict[str, Tensor]:
        """Outer state by name, the tensors themselves."""
        return {
            f"{state.fragment.key.rsplit('/', 1)[0]}/{number}/{name}": tensor
            for number, state in enumerate(self.all)
            for name, tensor in state.state().items()
        }

    def refresh(self) -> None:
        """Look up the tensors' addresses."""
        for state in self.all:
            state.fragment.refresh()

    @torch.no_grad()
    def take_snapshot(self) -> None:
        """Copy the tensors, for an exchange during which the next block computes."""
        for state in self.all:
            state.take_snapshot()

    def release_snapshot(self) -> None:
        """Read the tensors themselves again, after the exchange."""
        for state in self.all:
            state.uses_snapshot = False

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the tensors of the block's start, as far as it is known."""
        for state in self.all:
            state.restore()

    @torch.no_grad()
    def capture(self) -> None:
        """Take the present tensors as the start of the next block."""
        for state in self.all:
            state.capture()

    def measure(self, packings: Callable[[OuterState], Sequence[Packing]]) -> tuple[float, bool]:
        """The norm of the contribution, and whether all of it is finite; packs what it can on the way."""
        return measure(self._judged, packings)

    def take_mean_norms(self) -> None:
        """From now on take the norm of each mean displacement that is applied."""
        for one in self.parameters:
            one.mean_norms = {}

    @property
    def mean_norm(self) -> float:
        """Of the mean displacement that was applied last; 0 where none was taken."""
        for one in self.parameters:
            one.sum_mean_norms()
        return math.hypot(*(one.mean_norm for one in self.parameters))

    @mean_norm.setter
    def mean_norm(self, value: float) -> None:
        for number, one in enumerate(self.parameters):
            one.mean_norm = value if number == 0 else 0.0

    def finite(self) -> bool:
        """Whether all tensors are finite."""
        return all_finite(state.fragment for state in self._judged)

    @property
    def _judged(self) -> list[OuterState]:
        return [state for state in self.all if not state.fragment.from_rank_0]

    def checksum(self) -> int:
        """Checksum of the last exchange's result, which is then reset."""
        total = combine(state.checksum for state in self.all)
        for state in self.all:
            state.checksum.zero_()
        return total

    def renew_checksums(self) -> None:
        """Recompute the checksums of the state, so that the next exchange compares it."""
        for state in self.all:
            state.checksum.zero_()
            for tensor in state.state().values():
                fold(state.checksum, tensor)
