# SPDX-License-Identifier: Apache-2.0
"""The outer state of the local optimizers' moments: averaged, and compensated where the rule says so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.flat import Fragment, fragments
from paceline.core.optimizer_state import Named, OptimizerMoment, ensure_state, moments, parameter_state
from paceline.errors import UnsupportedError
from paceline.rules.outer.moments import block_decay, compensate
from paceline.update.engine.blocks.local_optimizers import LocalOptimizers
from paceline.update.engine.blocks.numbers import BlockEnd
from paceline.update.engine.blocks.outer_state import OuterState
from paceline.update.exchange.checksum import fold
from paceline.update.exchange.header import ExchangeSummary


class MomentState(OuterState):
    """One moment of the local optimizer.

    Args:
        moment: which one.
        decay: b, read at the time of use.
        compensated: whether the mean is compensated for the outer step.
    """

    def __init__(
        self,
        fragment: Fragment,
        moment: OptimizerMoment,
        decay: Callable[[], float],
        compensated: bool,
        device: torch.device | None,
    ) -> None:
        super().__init__(fragment, device)
        self._moment, self._decay, self._compensated = moment, decay, compensated
        self._snapshot_decay = 0.0
        self.init = fragment.zeros(self.device) if compensated else None

    def contribute(self, begin: int, end: int, out: Tensor) -> None:
        out.copy_(self.values(begin, end))

    def apply(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        self.fragment.write(begin, end, self._next(begin, end, mean, summary, block))

    def take_snapshot(self) -> None:
        super().take_snapshot()
        self._snapshot_decay = self._decay()  # a scheduler may change it during the exchange

    def _next(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> Tensor:
        """The moments with which the next block starts."""
        start = mean
        if self.init is not None:
            b = self._snapshot_decay if self.uses_snapshot else self._decay()
            weights = [h.factor for h in summary.headers]
            decay = block_decay(b, summary.minibatches, weights)
            start = self.init[begin:end]
            compensate(mean, start, decay=decay, ahead=b**block.ahead, square=self._moment.square, out=start)
            if self.fragment.dtype != self.dtype:  # the worker starts from the rounded values
                start.copy_(start.to(self.fragment.dtype))
        fold(self.checksum, start)
        return start

    def prepare(self, begin: int, end: int, mean: Tensor, summary: ExchangeSummary, block: BlockEnd) -> None:
        assert self.snapshot is not None
        torch.sub(self._next(begin, end, mean, summary, block), self.snapshot[begin:end], out=self.snapshot[begin:end])

    def move(self, begin: int, end: int, made: int) -> None:
        moved = self._add(begin, end, self._decay() ** made)
        self._put(begin, end, moved.clamp_(min=0) if self._moment.square else moved)

    def capture(self) -> None:
        if self.init is not None:
            self.init.copy_(self.fragment.whole(self.device))

    def restore(self) -> None:
        if self.init is not None:
            self.fragment.write(0, self.numel, self.init)

    def state(self) -> dict[str, Tensor]:
        return {} if self.init is None else {"init": self.init}


def moment_states(optimizers: LocalOptimizers, device: torch.device | None) -> list[MomentState]:
    """The outer states of all moments that workers average; creates missing optimizer state."""
    states = []
    for number, ((optimizer, named), choice) in enumerate(zip(optimizers.owned, optimizers.choices, strict=True)):
        if choice not in ("average", "compensate"):
            continue
        known = moments(optimizer)
        if not known:
            raise UnsupportedError(
                f"the state of {type(optimizer).__name__} cannot be averaged: only Adam, AdamW, SGD and "
                'Muon are known; use local_state="keep" or "reset"'
            )
        for _, parameter in named:
            ensure_state(optimizer, parameter)
        for moment in known:
            key = f"{moment.key}.{number}"
            states += _states_of(key, optimizer, named, moment, choice == "compensate", device)
    return states


def _states_of(
    key: str,
    optimizer: Optimizer,
    named: Named,
    moment: OptimizerMoment,
    compensated: bool,
    device: torch.device | None,
) -> list[MomentState]:
    """One outer state for each parameter group (betas may differ), dtype and device."""
    by_name = dict(named)

    def find(names: list[str]) -> list[Tensor]:
        found = []
        for name in names:
            ensure_state(optimizer, by_name[name])  # a loaded or cleared state may lack it
            state = parameter_state(optimizer, by_name[name], moment.key)
            assert state is not None
            found.append(state)
        return found

    states = []
    for place, group in enumerate(optimizer.param_groups):
        members = {id(p) for p in group["params"]}
        names = [name for name, p in named if id(p) in members]
        pairs = list(zip(names, find(names), strict=True))
        decay = _decay_of(optimizer, place, moment)
        for fragment in fragments(f"{key}.{place}", pairs, find):
            states.append(MomentState(fragment, moment, decay, compensated, device))
    return states


def _decay_of(optimizer: Optimizer, place: int, moment: OptimizerMoment) -> Callable[[], float]:
    return lambda: moment.decay(optimizer.param_groups[place])
