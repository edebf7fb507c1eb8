# SPDX-License-Identifier: Apache-2.0
"""The outer state of one fragment of the model: of its parameters, buffers and moments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.flat import Modules, fragments
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.buffers import buffer_states
from paceline.update.engine.blocks.local_optimizers import LocalOptimizers
from paceline.update.engine.blocks.moments import MomentState, moment_states
from paceline.update.engine.blocks.numbers import BlockNumbers
from paceline.update.engine.blocks.outer_state import OuterState, ParameterState, measure
from paceline.update.exchange.checksum import combine, fold


class FragmentState:
    """All outer states of one fragment.

    Args:
        rule: the rule.
        model: the user's modules (for buffers); None where another fragment carries them.
        optimizers: the fragment's.
        numbers: of its blocks.
        device: where outer state lies; None for the tensors' own device.
        mixes_at_once: whether the rule's mixing holds for exchanges that are waited for, too.

    Attributes:
        all: of parameters, buffers and moments, in this order.
        moments: made when the optimizers have made their state; None before.
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
    ) -> None:
        self._optimizers, self._device = optimizers, device
        everything = [pair for _, named in optimizers.owned for pair in named]
        self.parameters = [
            ParameterState(fragment, rule.merging, numbers, device, rule.payload.mixing, mixes_at_once)
            for fragment in fragments("parameters", everything)
        ]
        self.buffers = buffer_states(model, device) if model is not None else []
        self.drop_moments()
        if optimizers.have_state:  # moments from before attach are a start too
            self.make_moments()

    def make_moments(self) -> None:
        """The optimizers have made their state."""
        self.moments = moment_states(self._optimizers, self._device)
        self.all = [*self.averaged, *self.moments]

    def drop_moments(self) -> None:
        """The optimizers have no state yet."""
        self.moments = None
        self.all = [*self.averaged]

    @property
    def averaged(self) -> Sequence[OuterState]:
        """Those of parameters and buffers, which every worker has before its optimizers have state."""
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
        """The exchange is over."""
        for state in self.all:
            state.uses_snapshot = False

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the tensors of the block's start, as far as it is known."""
        for state in self.all:
            state.restore()

    @torch.no_grad()
    def capture(self) -> None:
        """Take the tensors as they are for the start of the next block."""
        for state in self.all:
            state.capture()

    def measure(self) -> tuple[float, bool]:
        """The norm of the contribution, and whether all of it is finite."""
        return measure(self.all)

    def finite(self) -> bool:
        """Whether all tensors are free of inf and nan."""
        return all(state.fragment.finite() for state in self.all)

    def checksum(self) -> int:
        """Of the state that the last exchange left; taken once."""
        total = combine(state.checksum for state in self.all)
        for state in self.all:
            state.checksum.zero_()
        return total

    def sum_anew(self) -> None:
        """The checksums of the state that all have taken over, so that the next exchange compares it."""
        for state in self.all:
            state.checksum.zero_()
            for tensor in state.state().values():
                fold(state.checksum, tensor)
