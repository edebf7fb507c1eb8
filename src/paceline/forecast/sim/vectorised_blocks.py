# SPDX-License-Identifier: Apache-2.0
"""Ends of blocks for stacked workers: the rule's equations on the mean over the leading dimension.

    d = mean_i theta_i - theta^init,     (theta, start) = outer(theta, d),     theta_i = start for all i

With local_state "average" and "compensate" the optimizer's moments likewise (:mod:`paceline.rules.outer.moments`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.optimizer_state import (
    OptimizerMoment,
    ensure_state,
    moments,
    parameter_state,
    reset_state,
    set_step_count,
)
from paceline.errors import NonFiniteError, UnsupportedError
from paceline.rules.outer.base import Coefficients, State
from paceline.rules.outer.diversity import effective_workers, ratio, smoothed
from paceline.rules.outer.moments import block_decay, compensate
from paceline.rules.outer.moving_average import EMA
from paceline.rules.rule import Rule


def check_rule(rule: Rule) -> None:
    """Refuse a rule whose exchange is not the mean of stacked tensors."""
    schedule, payload, reason = rule.schedule, rule.payload, ""
    if not schedule.workers_meet:
        reason = "its workers exchange each by itself"
    elif payload.moments_after is not None:
        reason = f"it exchanges {type(payload).__name__}"
    elif not rule.codec.exact:
        reason = f"its codec {type(rule.codec).__name__} is lossy"
    elif rule.settings.within:
        reason = f'it has within="{rule.settings.within}"'
    elif schedule.fragments > 1 or schedule.overlap:
        reason = f"it has fragments={schedule.fragments} and overlap={schedule.overlap}"
    elif payload.mixing is not None:
        reason = f"it mixes (mixing={payload.mixing})"
    if reason:
        raise UnsupportedError(f"{rule.text()} cannot be simulated stacked: {reason}; use paceline.simulate")
    if schedule.grow is not None:
        raise UnsupportedError(
            f"{rule.text()}: its number of workers grows, and that of simulate_stacked is fixed; use "
            "paceline.forecast.sim.simulate_grown, or leave grow out"
        )


@dataclass
class _Part:
    """The outer state of one parameter, each of its shape."""

    stacked: Tensor  # (N, ...)
    anchor: Tensor
    state: State
    init: dict[str, Tensor] = field(default_factory=dict)  # moment -> its value when the block began


class StackedBlocks:
    """Blocks of N stacked workers.

    Args:
        rule: a rule with blocks.
        optimizer: the user's, which resolves the rule's `local_state`.
        stacked: the optimizer of the stacked parameters.
        workers: N.
        measures: whether to measure how many workers all are worth.

    Attributes:
        made: minibatches that each worker has made in its present block.
    """

    def __init__(
        self, rule: Rule, optimizer: Optimizer, stacked: Optimizer, workers: int, measures: bool = False
    ) -> None:
        self._measures = measures or rule.follows_diversity
        self._rule, self._schedule, self._optimizer, self._workers = rule, rule.blocks, stacked, workers
        self._choice = rule.delta.resolve(optimizer)
        rule.delta.fit(stacked, workers)
        self._moments = moments(optimizer) if self._choice in ("average", "compensate") else ()
        self._look()
        self._parts = {p: _Part(p, p.detach()[0].clone(), {}) for p in self._everything}
        self._steps = self.made = self._block = 0
        self._rho = self._ahead = self._count = 0.0
        self._diversity: float | None = None
        self._begin()

    def _look(self) -> None:
        """Take the optimizer's present parameters."""
        self._groups = [(group, group["params"]) for group in self._optimizer.param_groups]
        self._everything = [p for _, parameters in self._groups for p in parameters]

    @property
    def effective(self) -> float:
        """How many workers they were worth in the last blocks."""
        return 1.0 if self._diversity is None else effective_workers(self._diversity)

    def grow(self, grown: dict[Tensor, Tensor], workers: int) -> None:
        """Continue with more workers; `grown` gives what stands in the place of each stacked parameter."""
        self._workers = workers
        self._parts = {grown[p]: replace(part, stacked=grown[p]) for p, part in self._parts.items()}
        self._look()

    def retune(self, rule: Rule) -> None:
        """Continue with another period."""
        self._rule, self._schedule = rule, rule.blocks

    @property
    def lockstep(self) -> bool:
        """Whether the current step belongs to the warm-up, in which gradients are exchanged."""
        return self._steps < self._schedule.warmup

    @torch.no_grad()
    def _begin(self) -> None:
        """Start the first block from the workers' equal parameters."""
        for part in self._parts.values():
            part.anchor.copy_(part.stacked[0])
            part.state = {name: torch.zeros_like(part.anchor) for name in self._rule.merging.tensors}
            if EMA in part.state:
                part.state[EMA].copy_(part.anchor)
            part.init = {moment.key: self._first(part, moment) for moment in self._moments}
        self._count = float(self._steps)

    def stepped(self) -> None:
        """All workers have made a minibatch."""
        warm = self.lockstep
        self._steps += 1
        if warm:
            if not self.lockstep:
                self._begin()
            return
        self.made += 1
        if self.made == self._schedule.period:
            self._end()

    def finish(self) -> None:
        """Merge the unfinished last block."""
        if self.lockstep:
            self._begin()
        if self.made:
            self._end()

    def global_of(self, stacked: Tensor) -> Tensor:
        """The global model's part of a stacked parameter, or its average if the rule has one."""
        part = self._parts[stacked]
        return part.state.get(EMA, part.anchor)

    @torch.no_grad()
    def _end(self) -> None:
        """Exchange at the end of a block."""
        tau, outer = float(self.made), self._rule.merging
        c = self._rule.coefficients(self._block + 1, self._workers, self._ahead, self._diversity or 1.0)
        self._rho, ahead = outer.equivalent_minibatches(self._rho, tau, c)
        if self._measures:
            self._measure(c)
        for part in self._parts.values():
            self._merge(part, c)
        for group, parameters in self._groups:
            for moment in self._moments:
                decay = moment.decay(group)
                for p in parameters:
                    self._merge_moment(self._parts[p], moment, decay, ahead)
        if self._choice == "reset":
            reset_state(self._optimizer, self._everything)
        elif self._moments:
            self._count += tau + (ahead if self._choice == "compensate" else 0.0)
            set_step_count(self._optimizer, self._everything, self._count)
        self._ahead, self._block, self.made = c.next_momentum, self._block + 1, 0

    def _measure(self, c: Coefficients) -> None:
        """Bring the diversity up to date; before the outer step, which uses that of the blocks before."""
        norms, norms_of_mean = [], []
        for part in self._parts.values():
            origin = self._rule.merging.origin(part.anchor, part.state, c, torch.empty_like(part.anchor))
            displacements = part.stacked - origin
            norms.append(displacements.flatten(1).norm(dim=1))
            norms_of_mean.append(displacements.mean(0).norm())
        each, mean = torch.stack(norms).norm(dim=0), torch.stack(norms_of_mean).norm()
        self._diversity = smoothed(self._diversity, ratio(float(each.mean()), float(mean), self._workers))

    def _merge(self, part: _Part, c: Coefficients) -> None:
        """The outer step of one parameter."""
        outer, scratch = self._rule.merging, torch.empty_like(part.anchor)
        origin = outer.origin(part.anchor, part.state, c, scratch)
        merged = part.stacked.mean(0).sub_(origin)
        if not bool(torch.isfinite(merged).all()):
            self._refuse(part.stacked)
        part.stacked.copy_(outer.step(part.anchor, merged, part.state, c, scratch).expand_as(part.stacked))

    def _refuse(self, stacked: Tensor) -> None:
        finite = torch.isfinite(stacked).flatten(1).all(1).tolist()
        bad = [str(rank) for rank, well in enumerate(finite) if not well]
        raise NonFiniteError(
            f"inf or nan in the parameters of worker {', '.join(bad) or '(their mean)'} after step {self._steps}; "
            "lower the learning rate, or use paceline.simulate, which leaves such a worker out"
        )

    def _first(self, part: _Part, moment: OptimizerMoment) -> Tensor:
        """A moment at the start of the first block: 0, or its value after the warm-up."""
        state = parameter_state(self._optimizer, part.stacked, moment.key)
        return torch.zeros_like(part.anchor) if state is None else state[0].clone()

    def _mean(self, stacked: Tensor, moment: OptimizerMoment) -> Tensor:
        """The workers' mean of a moment."""
        ensure_state(self._optimizer, stacked)
        state = parameter_state(self._optimizer, stacked, moment.key)
        assert state is not None
        return state.mean(0)

    def _merge_moment(self, part: _Part, moment: OptimizerMoment, b: float, ahead: float) -> None:
        """The next start of one parameter's moment; `ahead` in minibatches."""
        start = mean = self._mean(part.stacked, moment)
        if self._choice == "compensate":
            init = part.init[moment.key]
            decay = block_decay(b, [self.made], [1.0])
            start = compensate(mean, init, decay=decay, ahead=b**ahead, square=moment.square, out=init)
        state = parameter_state(self._optimizer, part.stacked, moment.key)
        assert state is not None
        state.copy_(start.expand_as(state))
