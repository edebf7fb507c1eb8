# SPDX-License-Identifier: Apache-2.0
"""One fragment of the model under a block rule: its outer state, and the exchange of its blocks. Knows no method by
name.

Gradient payloads are served by :mod:`paceline.update.engine.gradients.update`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from paceline.core.flat import Modules, all_finite, fragments
from paceline.core.shards import Shards
from paceline.core.world import World
from paceline.errors import NonFiniteError
from paceline.extensions import Observer
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.numbers import BlockNumbers, LocalOptimizers
from paceline.update.engine.blocks.outer_state import (
    MomentState,
    OuterState,
    OuterStateChunk,
    ParameterState,
    buffer_states,
    cut_states,
    measure,
    moment_states,
    packings,
)
from paceline.update.exchange.checksum import combine, fold
from paceline.update.exchange.exchanger import IN_FLIGHT, Exchanger, StartedExchange
from paceline.update.exchange.header import NO_PAYLOAD, ExchangeHeader, ExchangeKind, ExchangeSummary, LocalWork
from paceline.update.exchange.outliers import Guard, block_norms


class FragmentState:
    """All outer states of one fragment.

    Args:
        model: the user's modules, for their buffers; None if another fragment holds these.
        optimizers: the fragment's.
        numbers: of its blocks.
        device: of the outer state; None for the tensors' own device.
        world: gives this worker among those that exchange.

    Attributes:
        all: of parameters, buffers and moments, in this order.
        moments: created once the optimizers have state; None before.
    """

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
        self.parameters = [
            ParameterState(fragment, numbers, device) for fragment in fragments("parameters", everything)
        ]
        self.buffers = buffer_states(model, device, world) if model is not None else []
        self.drop_moments()
        if optimizers.have_state:  # from before attach
            self.make_moments()

    def make_moments(self) -> None:
        """Create the outer state of the moments, once the optimizers have state."""
        self.moments = moment_states(self.optimizers, self._device)
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

    def contributed(self) -> dict[str, Tensor]:
        """Number of each outer state -> the whole of what its tensors hold."""
        return {str(number): state.fragment.whole(state.device) for number, state in enumerate(self.all)}

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
        return all_finite(state.fragment for state in self.judged)

    @property
    def judged(self) -> list[OuterState]:
        """All but those that all take from rank 0."""
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


class BlockUpdate:
    """Block payloads of one fragment: its parameters, buffers and moments under one rule.

    Args:
        state: its outer state.
        exchanger: the connection.
        kind: of its exchanges.
        guard: the outlier policy, or None.
        shards: the processes that hold this worker's parameters, of all fragments.
        observers: of what this worker gives and takes.

    Attributes:
        numbers: of its blocks.
        optimizers: the worker's own.
        chunks: its outer state cut for the wire; empty before the first exchange.
        in_flight: the pending exchange, if any.
        left_out: whether this worker's part of the last exchange was not finite, or an outlier.
        norms: the recently accepted norms; None without an outlier policy.
    """

    def __init__(
        self,
        state: FragmentState,
        exchanger: Exchanger,
        kind: ExchangeKind,
        guard: Guard | None,
        shards: Shards,
        observers: Sequence[Observer],
    ) -> None:
        self.state, self.numbers, self.optimizers = state, state.numbers, state.optimizers
        self.exchanger, self._kind, self._shards, self._observers = exchanger, kind, shards, observers
        self._sharded = bool(shards)
        rule = self.numbers.rule
        self._overlapped = rule.schedule.overlap > 0
        self._mixes_at_once = self.numbers.mixes_at_once
        self.chunks: list[OuterStateChunk] = []
        self.in_flight: StartedExchange | None = None
        self.left_out = False
        self.norms = block_norms(guard, lambda: [one.anchor for one in state.parameters])
        self._measures = self.norms is not None or rule.follows_diversity
        if self._measures:
            state.take_mean_norms()

    def retune(self, rule: Rule) -> None:
        """Continue with other numbers of the rule; an in-flight exchange keeps its own. Another codec, which comes
        between two exchanges, begins without residuals."""
        if rule.codec != self.numbers.rule.codec:
            self.chunks = []
        self.numbers.rule = rule

    def prepare(self) -> None:
        """Create outer state that needs the optimizers' state, and look up addresses."""
        if self.state.moments is None:
            self.state.make_moments()
            self.chunks = []
        self.state.refresh()
        if not self.chunks:
            rule, overlapped, measured = self.numbers.rule, self._overlapped, self._measures
            self.chunks = cut_states(self.state.all, rule, self.exchanger, self.numbers, overlapped, measured)

    # -- the exchange -----------------------------------------------------------------------------

    def begin(self, work: LocalWork, overlapped: bool) -> None:
        """End the block: send its contribution.

        Args:
            work: this worker's minibatches in the block.
            overlapped: whether the next block computes during the exchange.
        """
        self.prepare()
        factor = work.minibatches / self.numbers.rule.schedule.period
        early = partial(self.exchanger.begin_early, self.chunks, factor=factor, number=self.numbers.block)
        for chunk in self.chunks:
            chunk.packed = False  # an exchange that failed may have left it
            chunk.on_packed = early if chunk.device.type == "cpu" and not work.stands else None
        self.numbers.minibatches = work.minibatches
        self.numbers.freeze()
        for one in self.state.buffers:
            one.reset_nonfinite()
        for observer in self._observers if work.minibatches else ():
            observer.gave(self._kind.fragment, self.state.contributed())
        header = self._header(work)
        if not header.usual:
            header = self.exchanger.pre_vote(header)
        self.left_out = not header.finite or (header.brings and not header.factor)
        if overlapped:
            self._begin_next_block()
        elif self.left_out and self._mixes_at_once:  # drop all of an invalid block
            self.restart()
        chunks_in_flight = 0 if overlapped else IN_FLIGHT
        self.in_flight = self.exchanger.start(
            header, self.chunks, self.numbers.block, chunks_in_flight, self.state.checksum
        )

    def _header(self, work: LocalWork) -> ExchangeHeader:
        measured = self._measures and work.minibatches > 0
        norm, finite = (
            measure(self.state.judged, partial(packings, self.chunks)) if measured else (0.0, self.state.finite())
        )
        mean_norm, usual = self.state.mean_norm, True
        if self._sharded:
            norm, mean_norm, finite = self._shards.together(norm, mean_norm, finite)
        rank = self.exchanger.transport.world.rank
        if norm and self.norms is not None:
            usual = self.norms.usual(rank, norm)
        if self._sharded:
            usual = self._shards.all(usual)
        return ExchangeHeader(
            sequence=0,
            kind=NO_PAYLOAD if work.stands else self._kind,
            brings=work.minibatches > 0 and not work.stands,
            leaving=work.leaving,
            finite=finite,
            minibatches=work.minibatches,
            norm=norm,
            factor=work.minibatches / self.numbers.rule.schedule.period if finite else 0.0,
            total=work.total,
            checksum=self.state.checksum(),
            usual=usual,
            merges=work.merges,
            mean_norm=mean_norm,
        )

    def _begin_next_block(self) -> None:
        """Begin the next block before this one's result has arrived."""
        if self.left_out:
            self.restart()
        self.state.take_snapshot()
        self.optimizers.reset_for_overlap()

    def land(self, made: int | None) -> ExchangeSummary:
        """Apply the mean, and start the next block from the result.

        Args:
            made: minibatches since `begin`; None without overlap.

        Raises `NonFiniteError`, `DesyncError` or `MismatchError` with the outer state untouched, `PeerLostError`.
        """
        assert self.in_flight is not None
        exchange, self.in_flight = self.in_flight, None
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
            observer.merged(self._kind.fragment, summary.headers[0].sequence, self.state.tensors(), summary)
        if self.norms is None:
            return summary
        between = self.norms.between
        self.norms.add(summary.accepted, summary.changed)
        return replace(summary, between=between)

    def arrive(self) -> None:
        """Wait until the outer state has the in-flight exchange's result."""
        if self.in_flight is not None:
            self.in_flight.arrive()

    # -- the block's start ------------------------------------------------------------------------

    def restart(self) -> None:
        """Restore the block's start, after an invalid block."""
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
        """Adapt to a changed number of workers: gains follow N, codecs start afresh, all states are compared again.

        The present block keeps its start.
        """
        self.optimizers.fit(workers)
        self.numbers.renumber(workers)
        if self.norms is not None:
            self.norms.mix()
        for chunk in self.chunks:
            chunk.state = {}
        self.state.renew_checksums()
