# SPDX-License-Identifier: Apache-2.0
"""One fragment of the model under a block rule: the optimizers of its parameters, its outer state, and the exchange of
its blocks. Knows no method by name.

Gradient payloads are served by :mod:`paceline.update.engine.gradients.update`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.flat import Modules, Shards, all_finite, fragments
from paceline.core.optimizer_state import Owned, reset_state, set_step_count, step_count
from paceline.core.world import World
from paceline.errors import NonFiniteError
from paceline.extensions import Observer
from paceline.rules.payload import Delta
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.outer_state import (
    BlockNumbers,
    MomentState,
    OuterState,
    OuterStateChunk,
    ParameterState,
    buffer_states,
    cut_states,
    measure,
    moment_states,
)
from paceline.update.exchange.exchanger import (
    NO_PAYLOAD,
    ExchangeHeader,
    Exchanger,
    ExchangeSummary,
    StartedExchange,
    combine,
    fold,
)
from paceline.update.exchange.outliers import FAR, Guard, Norms, farthest


class LocalOptimizers:
    """The worker's optimizers of one fragment."""

    def __init__(self, payload: Delta, owned: Owned, workers: int = 1) -> None:
        self._payload, self.owned = payload, owned
        self._fitted = False
        self._handles: list[Any] = []
        self.fit(workers)
        self.counts: list[float] = []  # of each optimizer the steps at the start of the block, as the rule counts them
        self.count()
        # of each optimizer "keep", "reset", "average" or "compensate"
        self.choices = [payload.resolve(optimizer) for optimizer, _ in owned]

    def __iter__(self) -> Iterator[tuple[int, str, Optimizer, list[Tensor]]]:
        """Number, choice, optimizer and its parameters."""
        for number, ((optimizer, named), choice) in enumerate(zip(self.owned, self.choices, strict=True)):
            yield number, choice, optimizer, [p for _, p in named]

    @property
    def have_state(self) -> bool:
        """Whether any of them has made a step, or was given a state."""
        return any(len(optimizer.state) for optimizer, _ in self.owned)

    def fit(self, workers: int) -> None:
        """Adapt their settings to several workers, once; a value that the user sets later stays."""
        if self._fitted or workers == 1 or self._payload.beta1 is None:
            return
        for optimizer, _ in self.owned:
            if self._payload.fit(optimizer):
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._fitted = True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._payload.hold(optimizer)

    def hold(self) -> None:
        """Let an exchange outside of a step see their settings as one in a step does: a schedule may have changed
        them."""
        for optimizer, _ in self.owned if self._handles else ():
            self._payload.hold(optimizer)

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def count(self) -> None:
        """Take the present step counts as those of the block's start."""
        self.counts = [step_count(optimizer, [p for _, p in named]) for optimizer, named in self.owned]

    def advance(self, tau: float, ahead: float, made: int | None, left_out: bool) -> None:
        """Update state and step counts after a block's exchange: `tau` equivalent minibatches of the mean displacement,
        which the next start is `ahead` of, `made` since it began (None without overlap)."""
        for number, choice, optimizer, parameters in self:
            if made is None and (choice == "reset" or (choice == "keep" and left_out)):
                reset_state(optimizer, parameters)
            elif choice in ("average", "compensate"):
                self._add(number, choice, tau, ahead)
                set_step_count(optimizer, parameters, self.counts[number] + (made or 0))

    def count_in(self, tau: float, ahead: float) -> None:
        """Count an exchange whose result is in the outer state already."""
        for number, choice in enumerate(self.choices):
            self._add(number, choice, tau, ahead)

    def _add(self, number: int, choice: str, tau: float, ahead: float) -> None:
        self.counts[number] += tau + (ahead if choice == "compensate" else 0.0)

    def restart(self) -> None:
        for number, choice, optimizer, parameters in self:
            if choice != "compensate":  # no copy was kept
                reset_state(optimizer, parameters)
                self.counts[number] = 0.0
            else:
                set_step_count(optimizer, parameters, self.counts[number])

    def begin_block(self, averaged: bool) -> None:
        """Begin a block after a reshard; `averaged`: whether moments had been exchanged."""
        for number, choice, optimizer, parameters in self:
            if choice == "compensate" and averaged:
                set_step_count(optimizer, parameters, self.counts[number])
            elif choice in ("compensate", "reset"):
                reset_state(optimizer, parameters)
                self.counts[number] = 0.0
            else:
                self.counts[number] = step_count(optimizer, parameters)


class FragmentState:
    """All outer states of one fragment; `model` has its buffers, and is None if another fragment holds these. `moments`
    are created once the optimizers have state, and None before."""

    all: list[OuterState]
    moments: list[MomentState] | None

    def __init__(
        self,
        model: Modules | None,
        optimizers: LocalOptimizers,
        numbers: BlockNumbers,
        device: torch.device | None,
        world: Callable[[], World],
    ) -> None:
        self.optimizers, self.numbers, self._device = optimizers, numbers, device
        everything = [pair for _, named in optimizers.owned for pair in named]
        self.parameters = [ParameterState(one, numbers, device) for one in fragments("parameters", everything)]
        self.buffers = buffer_states(model, device, world) if model is not None else []
        self.averaged: Sequence[OuterState] = [*self.parameters, *self.buffers]  # which exist before the moments
        self.drop_moments()
        if optimizers.have_state:  # from before attach
            self.make_moments()

    def make_moments(self) -> None:
        """Create the outer state of the moments, once the optimizers have state."""
        self.moments = moment_states(self.optimizers.owned, self.optimizers.choices, self._device)
        self.all = [*self.averaged, *self.moments]

    def drop_moments(self) -> None:
        self.moments = None
        self.all = [*self.averaged]

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
        for state in self.all:
            state.take_snapshot()

    def release_snapshot(self) -> None:
        """Read the tensors themselves again, after the exchange."""
        for state in self.all:
            state.uses_snapshot = False

    @torch.no_grad()
    def restore(self) -> None:
        for state in self.all:
            state.restore()

    @torch.no_grad()
    def capture(self) -> None:
        for state in self.all:
            state.capture()

    @property
    def mean_norm(self) -> float:
        """Of the mean displacement that was applied last; 0 where none was taken."""
        return math.hypot(*(one.sum_mean_norms() for one in self.parameters))

    @mean_norm.setter
    def mean_norm(self, value: float) -> None:
        for number, one in enumerate(self.parameters):
            one.mean_norm = value if number == 0 else 0.0

    def finite(self) -> bool:
        """Whether all is, but for what all take from rank 0."""
        return all_finite(state.fragment for state in self.all if not state.fragment.from_rank_0)

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


class BlockUpdate:
    """Block payloads of one fragment: its parameters, buffers and moments under one rule; `shards`: the processes that
    hold this worker's parameters, of all fragments."""

    def __init__(
        self,
        number: int,
        state: FragmentState,
        exchanger: Exchanger,
        guard: Guard | None,
        shards: Shards,
        observers: Sequence[Observer],
    ) -> None:
        self._number, self.state, self.exchanger = number, state, exchanger
        self.numbers, self.optimizers = state.numbers, state.optimizers
        self._shards, self._sharded, self._observers = shards, shards.any, observers
        self.chunks: list[OuterStateChunk] = []  # its outer state cut for the wire; empty before the first exchange
        self.in_flight: StartedExchange | None = None  # the pending exchange, if any
        self.left_out = False  # whether this worker's part of the last exchange was not finite, or an outlier
        self.norms: Norms | None = None  # the recently accepted norms; None without an outlier policy
        if guard is not None:
            self.norms = Norms(guard, lambda: farthest((one.anchor for one in state.parameters), FAR))
        self._measures = self.norms is not None or self.numbers.rule.follows_diversity
        if self._measures:
            for one in state.parameters:
                one.mean_norms = {}

    def retune(self, rule: Rule) -> None:
        """Continue with other numbers of the rule; an in-flight exchange keeps its own. Another codec, which comes
        between two exchanges, begins without residuals."""
        if rule.codec != self.numbers.rule.codec:
            self.chunks = []
        self.numbers.rule = rule

    def prepare(self) -> None:
        """Create outer state that needs the optimizers' state, look up addresses, and cut it all for the wire."""
        self.state.refresh()
        if self.state.moments is None:
            self.state.make_moments()
            self.chunks = []
        if not self.chunks:
            self.chunks = cut_states(self.state.all, self.exchanger, self.numbers, self._measures)

    # -- the exchange -----------------------------------------------------------------------------

    def begin(self, header: ExchangeHeader, overlapped: bool = False) -> None:
        """End the block: send its contribution. `header` says of it what is not measured here; `overlapped`: whether
        the next block computes during the exchange."""
        self.optimizers.hold()
        self.prepare()
        state, numbers, exchanger = self.state, self.numbers, self.exchanger
        numbers.minibatches = header.minibatches
        numbers.freeze()
        for one in state.buffers:
            one.reset_nonfinite()
        for observer in self._observers if header.minibatches else ():
            observer.gave(self._number, {str(k): one.fragment.whole(one.device) for k, one in enumerate(state.all)})
        header = self._header(header)
        if not header.usual:
            header = exchanger.pre_vote(header)
        self.left_out = not header.finite or (header.brings and not header.factor)
        if self.left_out and (overlapped or numbers.mixes_at_once):  # drop all of an invalid block
            self.restart()
        if overlapped:  # the next block begins before this one's result has arrived
            state.take_snapshot()
            for _, choice, optimizer, parameters in self.optimizers:
                if choice == "reset":
                    reset_state(optimizer, parameters)
        self.in_flight = exchanger.start(header, self.chunks, numbers.block, state.checksum, overlapped)

    def _header(self, header: ExchangeHeader) -> ExchangeHeader:
        """Pack the contribution, and say in the header what that told; the first chunks leave meanwhile."""
        state, exchanger, number = self.state, self.exchanger, self.numbers.block
        factor = header.minibatches / self.numbers.rule.schedule.period

        def packed(chunk: OuterStateChunk) -> None:
            if chunk.outer.device.type == "cpu":
                exchanger.begin_early(self.chunks, chunk, factor, number)

        mean_norm, usual = state.mean_norm, True
        if self._measures and header.minibatches:
            early = exchanger.sends_early and header.kind != NO_PAYLOAD
            norm, finite = measure(state.all, self.chunks, packed if early else None)
        else:
            norm, finite = 0.0, state.finite()
        if self._sharded:
            norm, mean_norm, finite = self._shards.together(norm, mean_norm, finite)
        if norm and self.norms is not None:
            usual = self.norms.usual(exchanger.transport.world.rank, norm)
        if self._sharded:
            usual = self._shards.all(usual)
        return replace(
            header,
            finite=finite,
            norm=norm,
            factor=factor if finite else 0.0,
            checksum=state.checksum(),
            usual=usual,
            mean_norm=mean_norm,
        )

    def land(self, made: int | None) -> ExchangeSummary:
        """Apply the mean, and start the next block from the result; `made`: minibatches since `begin`, None without
        overlap. Raises `PeerLostError`; `NonFiniteError`, `DesyncError` or `MismatchError` with the outer state
        untouched."""
        assert self.in_flight is not None
        exchange, self.in_flight = self.in_flight, None
        if made is not None:  # else nothing has moved since `begin`
            self.state.refresh()
        try:
            summary = exchange.finish(made or 0)
            rank = self.exchanger.transport.world.rank  # only now: an elastic run may have other members
            own = summary.headers[rank]
            self.left_out = self.left_out or (own.brings and not own.factor)
            if summary.weight > 0:
                end = self.numbers.advance(summary)
                self.optimizers.advance(summary.tau, end.ahead, made, self.left_out)
            elif self.left_out:  # nobody else brought anything
                self.restart()
        except NonFiniteError:
            self.restart()
            raise
        finally:
            self.state.release_snapshot()
            self.numbers.release()
        for observer in () if summary.empty else self._observers:
            observer.merged(self._number, summary.headers[0].sequence, self.state.tensors(), summary)
        if self.norms is None:
            return summary
        return replace(summary, between=self.norms.add(summary.accepted, summary.changed))

    # -- the block's start ------------------------------------------------------------------------

    def restart(self) -> None:
        self.state.restore()
        self.optimizers.restart()

    def capture(self) -> None:
        """Take the present model and moments as the first block's start; after `prepare`."""
        self.optimizers.count()
        self.state.capture()

    def forget(self) -> None:
        """Drop the in-flight exchange and the codecs' state."""
        self.chunks, self.in_flight, self.left_out = [], None, False

    def renumber(self, workers: int) -> None:
        """Adapt to a changed number of workers: gains follow N, codecs start afresh, all states are compared again. The
        present block keeps its start."""
        self.optimizers.fit(workers)
        self.numbers.renumber(workers)
        if self.norms is not None:
            self.norms.mix()
        for chunk in self.chunks:
            chunk.state = {}
        self.state.renew_checksums()
