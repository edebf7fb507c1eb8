# SPDX-License-Identifier: Apache-2.0
"""Ends of blocks for stacked workers: the rule's equations on the mean over the leading dimension.

    d = mean_i theta_i - theta^init,     (theta, start) = outer(theta, d),     theta_i = start for all i

With local_state "average" and "compensate" the optimizer's moments likewise (:mod:`paceline.rules.outer.moments`).
Running statistics take the mean, and other buffers worker 0's. With overlap an exchange is applied some minibatches
later, to what the workers have made of the tensors meanwhile (:mod:`paceline.update.engine.blocks.outer_state` has the
equations).
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
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


def check_rule(rule: Rule, overlaps: bool = True) -> None:
    """Refuse a rule whose exchange is not the mean of stacked tensors; `overlaps`: whether it may be under way while
    the next block trains."""
    schedule, payload, reason = rule.schedule, rule.payload, ""
    if not schedule.workers_meet:
        reason = "its workers exchange each by itself"
    elif payload.moments_after is not None:
        reason = f"it exchanges {type(payload).__name__}"
    elif not rule.codec.exact:
        reason = f"its codec {type(rule.codec).__name__} is lossy"
    elif rule.settings.within:
        reason = f'it has within="{rule.settings.within}"'
    elif schedule.fragments > 1:
        reason = f"it has fragments={schedule.fragments}"
    elif schedule.overlap and not overlaps:
        reason = f"it has overlap={schedule.overlap}, and its number of workers changes"
    elif payload.mixing is not None:
        reason = f"it mixes (mixing={payload.mixing})"
    if reason:
        raise UnsupportedError(f"{rule.text()} cannot be simulated stacked: {reason}; use paceline.simulate")
    if schedule.grow is not None:
        raise UnsupportedError(
            f"{rule.text()}: its number of workers grows, and that of simulate_stacked is fixed; use "
            "paceline_plugins.forecast.simulate_grown, or leave grow out"
        )


@torch.no_grad()
def share(stacked: Tensor, of_worker_0: bool = False) -> None:
    """Give every worker the mean, or what worker 0 has."""
    stacked.copy_((stacked[0].clone() if of_worker_0 else _mean(stacked)).expand_as(stacked))


def _mean(stacked: Tensor) -> Tensor:
    """Over the workers, with 32 bits at least."""
    wide = torch.promote_types(stacked.dtype, torch.float32)
    return stacked.mean(0, dtype=wide).to(stacked.dtype)


@dataclass
class _Part:
    """The outer state of one parameter, each of its shape."""

    stacked: Tensor  # (N, ...)
    anchor: Tensor
    state: State
    init: dict[str, Tensor] = field(default_factory=dict)  # moment -> its value when the block began


@dataclass
class _Exchange:
    """The end of a block, until it is applied."""

    c: Coefficients  # its coefficients
    tau: float  # minibatches of the block
    ahead: float  # minibatches that the next start is ahead of the mean
    merged: dict[Tensor, Tensor]  # parameter -> the mean displacement
    means: dict[tuple[Tensor, str], Tensor]  # (parameter, moment) -> the mean of the moment
    buffers: list[Tensor]  # the means of the buffers
    # parameter, or (parameter, moment) -> every worker's when the exchange began; with overlap
    snapshots: dict[Tensor | tuple[Tensor, str], Tensor] = field(default_factory=dict)
    made: int = 0  # minibatches since then


class StackedBlocks:
    """Blocks of N stacked workers.

    Args:
        rule: a rule with blocks.
        optimizer: the user's, which resolves the rule's `local_state`.
        stacked: the optimizer of the stacked parameters.
        buffers: name -> stacked buffer.
        of_worker_0: names of those of which all workers take worker 0's.
        workers: N.
        measures: whether to measure how many workers all are worth.

    Attributes:
        made: minibatches that each worker has made in its present block.
    """

    def __init__(
        self,
        rule: Rule,
        optimizer: Optimizer,
        stacked: Optimizer,
        buffers: dict[str, Tensor],
        of_worker_0: AbstractSet[str],
        workers: int,
        measures: bool = False,
    ) -> None:
        self._measures = measures or rule.follows_diversity
        self._rule, self._schedule, self._optimizer, self._workers = rule, rule.blocks, stacked, workers
        self._choice = rule.delta.resolve(optimizer)
        if workers > 1:
            rule.delta.fit(stacked)
        self._moments = moments(optimizer) if self._choice in ("average", "compensate") else ()
        self._look()
        self._parts = {p: _Part(p, p.detach()[0].clone(), {}) for p in self._everything}
        self._buffers = list(buffers.values())
        self._of_worker_0 = [name in of_worker_0 for name in buffers]
        self._means: dict[Tensor, Tensor] = {}
        self._steps = self.made = self._block = 0
        self._rho = self._ahead = self._count = 0.0
        self._diversity: float | None = None
        self._under_way: _Exchange | None = None
        self._begin()

    def _look(self) -> None:
        """Take the optimizer's present parameters."""
        self._groups = [(group, group["params"]) for group in self._optimizer.param_groups]
        self._everything = [p for _, parameters in self._groups for p in parameters]

    @property
    def effective(self) -> float:
        """How many workers they were worth in the last blocks."""
        return 1.0 if self._diversity is None else effective_workers(self._diversity)

    def grow(self, grown: dict[Tensor, Tensor], buffers: dict[str, Tensor], workers: int) -> None:
        """Continue with more workers; `grown` gives what stands in the place of each stacked parameter."""
        self._workers, self._buffers = workers, list(buffers.values())
        self._means = {b: self._means[old] for b, old in zip(self._buffers, self._means, strict=True)}
        self._parts = {grown[p]: replace(part, stacked=grown[p]) for p, part in self._parts.items()}
        self._look()

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
        self._means = {buffer: buffer[0].clone() for buffer in self._buffers}
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
        if self._under_way is not None:
            self._under_way.made += 1
            if self._under_way.made == self._schedule.overlap:
                self._land()
        if self.made == self._schedule.period:
            self._end()

    def finish(self) -> None:
        """Merge the unfinished last block."""
        if self.lockstep:
            self._begin()
        if self._under_way is not None:
            self._land()
        if self.made:
            self._end(waits=True)

    def global_of(self, stacked: Tensor) -> Tensor:
        """The global model's part of a stacked parameter or buffer, or its average if the rule has one."""
        if stacked in self._means:
            return self._means[stacked]
        part = self._parts[stacked]
        return part.state.get(EMA, part.anchor)

    @torch.no_grad()
    def _end(self, waits: bool = False) -> None:
        """Exchange at the end of a block; it is applied at once, or with overlap later unless the worker `waits`."""
        self._under_way = self._send()
        self.made = 0
        if waits or not self._schedule.overlap:
            self._land()
            return
        sent = self._under_way
        for p in self._everything:
            sent.snapshots[p] = p.detach().clone()
            for moment in self._moments:
                sent.snapshots[p, moment.key] = self._state(p, moment).clone()
        if self._choice == "reset":
            reset_state(self._optimizer, self._everything)

    def _send(self) -> _Exchange:
        """What the workers bring to an exchange."""
        tau, outer = float(self.made), self._rule.merging
        c = self._rule.coefficients(self._block + 1, self._workers, self._ahead, self._diversity or 1.0)
        self._rho, ahead = outer.equivalent_minibatches(self._rho, tau, c)
        if self._measures:
            self._measure(c)
        merged = {p: self._displacement(part, c) for p, part in self._parts.items()}
        means = {(p, m.key): self._state(p, m).mean(0) for p in self._everything for m in self._moments}
        pairs = zip(self._buffers, self._of_worker_0, strict=True)
        buffers = [buffer[0].clone() if copied else _mean(buffer) for buffer, copied in pairs]
        for buffer, mean in zip(self._buffers, buffers, strict=True):
            if not bool(torch.isfinite(mean).all()):
                self._refuse(buffer, "buffers")
        return _Exchange(c, tau, ahead, merged, means, buffers)

    @torch.no_grad()
    def _land(self) -> None:
        """Apply the exchange that is under way."""
        sent, self._under_way = self._under_way, None
        assert sent is not None
        for part in self._parts.values():
            self._merge(part, sent)
        for group, parameters in self._groups:
            for moment in self._moments:
                for p in parameters:
                    self._merge_moment(self._parts[p], moment, moment.decay(group), sent)
        for buffer, mean, copied in zip(self._buffers, sent.buffers, self._of_worker_0, strict=True):
            self._means[buffer] = mean
            if copied:
                buffer[1:].copy_(mean)
                continue
            now = mean.expand_as(buffer)
            buffer.copy_(torch.lerp(now, buffer, 0.5) if sent.snapshots else now)
        if self._choice == "reset" and not sent.snapshots:
            reset_state(self._optimizer, self._everything)
        elif self._moments:
            self._count += sent.tau + (sent.ahead if self._choice == "compensate" else 0.0)
            set_step_count(self._optimizer, self._everything, self._count + sent.made)
        self._ahead, self._block = sent.c.next_momentum, self._block + 1

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

    def _displacement(self, part: _Part, c: Coefficients) -> Tensor:
        """The mean displacement of one parameter."""
        origin = self._rule.merging.origin(part.anchor, part.state, c, torch.empty_like(part.anchor))
        merged = part.stacked.mean(0).sub_(origin)
        if not bool(torch.isfinite(merged).all()):
            self._refuse(part.stacked, "parameters")
        return merged

    def _merge(self, part: _Part, sent: _Exchange) -> None:
        """The outer step of one parameter."""
        scratch = torch.empty_like(part.anchor)
        start = self._rule.merging.step(part.anchor, sent.merged[part.stacked], part.state, sent.c, scratch)
        if sent.snapshots:
            part.stacked.add_(start - sent.snapshots[part.stacked])
        else:
            part.stacked.copy_(start.expand_as(part.stacked))

    def _refuse(self, stacked: Tensor, what: str) -> None:
        finite = torch.isfinite(stacked).flatten(1).all(1).tolist()
        bad = [str(rank) for rank, well in enumerate(finite) if not well]
        raise NonFiniteError(
            f"inf or nan in the {what} of worker {', '.join(bad) or '(their mean)'} after step {self._steps}; "
            "lower the learning rate, or use paceline.simulate, which leaves such a worker out"
        )

    def _first(self, part: _Part, moment: OptimizerMoment) -> Tensor:
        """A moment at the start of the first block: 0, or its value after the warm-up."""
        state = parameter_state(self._optimizer, part.stacked, moment.key)
        return torch.zeros_like(part.anchor) if state is None else state[0].clone()

    def _state(self, stacked: Tensor, moment: OptimizerMoment) -> Tensor:
        """The workers' moment."""
        ensure_state(self._optimizer, stacked)
        state = parameter_state(self._optimizer, stacked, moment.key)
        assert state is not None
        return state

    def _merge_moment(self, part: _Part, moment: OptimizerMoment, b: float, sent: _Exchange) -> None:
        """The next start of one parameter's moment."""
        start = mean = sent.means[part.stacked, moment.key]
        if self._choice == "compensate":
            init = part.init[moment.key]
            decay = block_decay(b, [int(sent.tau)], [1.0])
            start = compensate(mean, init, decay=decay, ahead=b**sent.ahead, square=moment.square, out=init)
        state = self._state(part.stacked, moment)
        if not sent.snapshots:
            state.copy_(start.expand_as(state))
            return
        state.add_(start - sent.snapshots[part.stacked, moment.key], alpha=b**sent.made)
        if moment.square:
            state.clamp_(min=0)
