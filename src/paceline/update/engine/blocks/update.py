# SPDX-License-Identifier: Apache-2.0
"""Block payloads: gathers what travels after a block, exchanges it, applies it. Knows no method by name.

Gradient payloads are served by :mod:`paceline.update.engine.gradients.update`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.flat import Modules, fragments
from paceline.core.optimizer_state import (
    Moment,
    Named,
    ensure_state,
    moments,
    parameter_state,
    reset_state,
    set_step_count,
    step_count,
)
from paceline.errors import NonFiniteError, UnsupportedError
from paceline.rules.codec import Dense, State
from paceline.rules.outer.base import Coefficients
from paceline.rules.payload import Delta
from paceline.rules.rule import Rule
from paceline.rules.schedule import EveryBlock
from paceline.update.engine.blocks.buffers import buffer_lanes
from paceline.update.engine.blocks.chunks import LaneChunk, cut
from paceline.update.engine.blocks.outer_state import Lane, MomentLane, Moves, ParameterLane, measure
from paceline.update.exchange.checksum import combine, fold
from paceline.update.exchange.exchanger import IN_FLIGHT, Exchanger, InFlightExchange, StartedExchange
from paceline.update.exchange.header import ExchangeSummary, Header
from paceline.update.exchange.kind import Kind
from paceline.update.exchange.outliers import Guard, block_norms
from paceline.update.exchange.work import Work


class BlockUpdate:
    """Block payloads: parameters, buffers and moments of one model under one rule.

    Args:
        rule: the rule.
        exchanger: the connection.
        model: the user's modules (for buffers); None where another fragment carries them.
        owned: (optimizer, its named parameters) pairs, those of this fragment.
        state_device: where outer state lies; None for the parameters' own device.
        kind: what its headers say.
        workers: N, as the rule counts them.
        guard: against contributions that are far larger than usual, or None.
    """

    def __init__(
        self,
        rule: Rule,
        exchanger: Exchanger,
        model: Modules | None,
        owned: list[tuple[Optimizer, Named]],
        state_device: torch.device | None,
        kind: Kind,
        workers: int,
        guard: Guard | None = None,
    ) -> None:
        assert isinstance(rule.payload, Delta) and isinstance(rule.schedule, EveryBlock)
        self.workers = workers
        self.kind, self._period = kind, rule.schedule.period
        self._behind = rule.schedule.overlap > 0
        self._mixes_at_once = rule.payload.mixing is not None and not self._behind
        self._rule, self._exchanger, self._owned, self._device = rule, exchanger, owned, state_device
        self.choices = [rule.payload.resolve(optimizer) for optimizer, _ in owned]
        self._fitted = False
        self._fit()
        self.block, self.rho, self.ahead = 0, 0.0, 0.0
        self.counts = [step_count(o, [p for _, p in named]) for o, named in owned]
        everything = [pair for _, named in owned for pair in named]
        self.parameter_lanes = [
            ParameterLane(
                fragment, rule.merging, self._coefficients, state_device, rule.payload.mixing, self._mixes_at_once
            )
            for fragment in fragments("parameters", everything)
        ]
        self.buffer_lanes = buffer_lanes(model, state_device) if model is not None else []
        self.moment_lanes: list[MomentLane] | None = None  # made when the optimizers have made their state
        self._chunks: list[LaneChunk] = []
        self._minibatches = 0
        self._flight: StartedExchange | None = None
        self._left_out = False
        self._norms = block_norms(guard, lambda: [lane.anchor for lane in self.parameter_lanes])
        self._moves_of: tuple[ExchangeSummary, Moves] | None = None
        self._begun_with: Coefficients | None = None
        if any(len(optimizer.state) for optimizer, _ in owned):  # moments from before attach are a start too
            self.moment_lanes = self._make_moment_lanes()

    def _fit(self) -> None:
        """Once, when there are several workers: what the user sets later stays."""
        if self._fitted or self.workers == 1:
            return
        assert isinstance(self._rule.payload, Delta)
        for optimizer, _ in self._owned:
            self._rule.payload.fit(optimizer, self.workers)
        self._fitted = True

    # -- the numbers of a block -------------------------------------------------------------------

    def _coefficients(self) -> Coefficients:
        """Of the block under way; of one that is being exchanged, those with which its exchange began."""
        return self._begun_with or self._rule.coefficients(self.block + 1, self.workers, self.ahead)

    def retune(self, rule: Rule) -> None:
        """Go on with other numbers; an exchange under way ends with those with which it began."""
        assert isinstance(rule.schedule, EveryBlock)
        self._rule, self._period = rule, rule.schedule.period
        for lane in self.parameter_lanes:
            lane.retune(rule.merging)

    def _moves(self, summary: ExchangeSummary) -> Moves:
        if self._moves_of is None or self._moves_of[0] is not summary:
            c = self._coefficients()
            _, ahead = self._rule.merging.equivalent_minibatches(self.rho, summary.tau, c)
            self._moves_of = (summary, Moves(c, ahead))
        return self._moves_of[1]

    # -- lanes and chunks -------------------------------------------------------------------------

    @property
    def lanes(self) -> list[Lane]:
        return [*self.parameter_lanes, *self.buffer_lanes, *(self.moment_lanes or [])]

    def _make_moment_lanes(self) -> list[MomentLane]:
        lanes = []
        for number, ((optimizer, named), choice) in enumerate(zip(self._owned, self.choices, strict=True)):
            if choice not in ("average", "compensate"):
                continue
            known = moments(optimizer)
            if not known:
                raise UnsupportedError(
                    f"the state of {type(optimizer).__name__} cannot be averaged: only Adam, AdamW and SGD are known; "
                    'use local_state="keep" or "reset"'
                )
            for _, parameter in named:
                ensure_state(optimizer, parameter)
            for moment in known:
                lanes += self._lanes_of(number, optimizer, named, moment, choice == "compensate")
        return lanes

    def _lanes_of(
        self, number: int, optimizer: Optimizer, named: Named, moment: Moment, compensated: bool
    ) -> list[MomentLane]:
        """A lane for each parameter group (they may differ in their betas), dtype and device."""
        by_name = dict(named)

        def find(names: list[str]) -> list[Tensor]:
            found = []
            for name in names:
                ensure_state(optimizer, by_name[name])  # a loaded or cleared state may lack it
                state = parameter_state(optimizer, by_name[name], moment.key)
                assert state is not None
                found.append(state)
            return found

        lanes = []
        for place, group in enumerate(optimizer.param_groups):
            members = {id(p) for p in group["params"]}
            names = [name for name, p in named if id(p) in members]
            pairs = list(zip(names, find(names), strict=True))
            decay = _decay_of(optimizer, place, moment)
            for fragment in fragments(f"{moment.key}.{number}.{place}", pairs, find):
                lanes.append(MomentLane(fragment, moment, decay, compensated, self._device))
        return lanes

    def prepare(self) -> None:
        """Make what can only be made once the optimizers have made their state; make sure of addresses."""
        if self.moment_lanes is None:
            self.moment_lanes = self._make_moment_lanes()
            self._chunks = []
        for lane in self.lanes:
            lane.fragment.refresh()
        if not self._chunks:
            self._chunks = self._cut_chunks()

    def _cut_chunks(self) -> list[LaneChunk]:
        """All lanes as chunks; a few wire buffers for each dtype and device take turns, where nothing stays in them."""
        pieces: list[tuple[Lane, int, int]] = []
        total = sum(lane.numel for lane in self.lanes)
        codec = self._rule.codec
        for lane in self.lanes:
            wanted = max(1, round(self._rule.common.chunks * lane.numel / max(total, 1)))
            coarse = self._exchanger.transport.coarse
            ranges = cut(lane.layout, wanted, Dense() if lane.lossless else codec, coarse)
            pieces += [(lane, begin, end) for begin, end in ranges]
        wires: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}
        longest: dict[tuple[torch.dtype, torch.device], int] = {}
        for lane, begin, end in pieces:
            key = (lane.dtype, self._exchanger.transport.wire_device(lane.device))
            longest[key] = max(longest.get(key, 0), end - begin)
        chunks = []
        for turn, (lane, begin, end) in enumerate(pieces):
            key = (lane.dtype, self._exchanger.transport.wire_device(lane.device))
            own = self._behind or not (codec.exact or lane.lossless)
            name = (*key, -1 - turn if own else turn % IN_FLIGHT)
            if name not in wires:
                wires[name] = torch.zeros(end - begin if own else longest[key], dtype=key[0], device=key[1])
            chunks.append(LaneChunk(lane, begin, end, wires[name], lambda: self._minibatches, self._moves))
        return chunks

    # -- the exchange -----------------------------------------------------------------------------

    def begin(self, work: Work, behind: bool) -> None:
        """End the block: send what it brought.

        Args:
            work: what the block was.
            behind: whether the worker goes on while the exchange is under way; else it is done in `land`.
        """
        self.prepare()
        self._minibatches = work.minibatches
        self._begun_with = self._coefficients()
        for lane in self.buffer_lanes:
            lane.mend()
        norm, finite = self._measure(work)
        header = Header(
            sequence=0,
            kind=self.kind,
            brings=work.minibatches > 0,
            leaving=work.leaving,
            finite=finite,
            minibatches=work.minibatches,
            norm=norm,
            factor=work.minibatches / self._period if finite else 0.0,
            total=work.total,
            checksum=self.checksum(),
            usual=not norm or self._norms is None or self._norms.usual(self._exchanger.transport.world.rank, norm),
            merges=work.merges,
        )
        if not header.usual:
            header = self._exchanger.pre_vote(header)
        self._left_out = not finite or (header.brings and not header.factor)
        if behind:
            self._prepare_to_go_on()
        elif self._left_out and self._mixes_at_once:  # nothing of a spoilt block is to stay
            self.restart()
        at_once = 0 if behind else IN_FLIGHT
        self._flight = self._exchanger.start(header, self._chunks, self.block, at_once, self.checksum)

    def _measure(self, work: Work) -> tuple[float, bool]:
        """The norm of what the block brought, 0 where it is not judged, and whether all is finite."""
        if self._norms is not None and work.minibatches:
            return measure(self.lanes)
        return 0.0, all(lane.fragment.finite() for lane in self.lanes)

    def _prepare_to_go_on(self) -> None:
        """The next block begins before the last one's result is there."""
        with torch.no_grad():
            if self._left_out:
                self.restart()
            for lane in self.lanes:
                lane.hold()
        for (optimizer, named), choice in zip(self._owned, self.choices, strict=True):
            if choice == "reset":
                reset_state(optimizer, [p for _, p in named])

    def land(self, made: int | None) -> ExchangeSummary:
        """Apply what `begin` sent, and start the next block from the result.

        Args:
            made: minibatches made since `begin`; None where the worker stood still.

        Raises `NonFiniteError`, `DesyncError` or `MismatchError` with the outer state untouched, `PeerLostError`.
        """
        assert self._flight is not None
        flight, self._flight = self._flight, None
        for lane in self.lanes:
            lane.fragment.refresh()
        try:
            summary = flight.finish(made or 0)
            if summary.weight > 0:
                self._advance(summary, made)
        except NonFiniteError:
            self.restart()
            raise
        finally:
            for lane in self.lanes:
                lane.held = False
            self._begun_with = None
        own = summary.headers[self._exchanger.transport.world.rank]
        self._left_out = self._left_out or (own.brings and not own.factor)
        if self._norms is None:
            return summary
        between = self._norms.between
        self._norms.add(summary.accepted, summary.changed)
        return replace(summary, between=between)

    def checksum(self) -> int:
        """Of the state that the last exchange left, combined over the lanes; taken once."""
        total = combine(lane.checksum for lane in self.lanes)
        for lane in self.lanes:
            lane.checksum.zero_()
        return total

    def _advance(self, summary: ExchangeSummary, made: int | None) -> None:
        moves = self._moves(summary)
        self.rho, _ = self._rule.merging.equivalent_minibatches(self.rho, summary.tau, moves.coefficients)
        self.ahead = moves.coefficients.next_momentum
        self.block += 1
        for number, ((optimizer, named), choice) in enumerate(zip(self._owned, self.choices, strict=True)):
            parameters: list[Tensor] = [p for _, p in named]
            if made is None and (choice == "reset" or (choice == "keep" and self._left_out)):
                reset_state(optimizer, parameters)
            elif choice in ("average", "compensate"):
                self.counts[number] += summary.tau + (moves.ahead if choice == "compensate" else 0.0)
                set_step_count(optimizer, parameters, self.counts[number] + (made or 0))

    @property
    def left_out(self) -> bool:
        """Whether this worker's part of the last exchange was not finite, or far larger than usual."""
        return self._left_out

    def restart(self) -> None:
        """After a block that nobody can use: back to where it began."""
        with torch.no_grad():
            for lane in self.lanes:
                lane.restore()
        for number, ((optimizer, named), choice) in enumerate(zip(self._owned, self.choices, strict=True)):
            if choice != "compensate":  # nothing of the block's start was kept
                reset_state(optimizer, [p for _, p in named])
                self.counts[number] = 0.0
            else:
                set_step_count(optimizer, [p for _, p in named], self.counts[number])

    def capture(self) -> None:
        """Take model and moments, which are the same on all workers, for the first block's start; after `prepare`."""
        self.counts = [step_count(o, [p for _, p in named]) for o, named in self._owned]
        with torch.no_grad():
            for lane in self.lanes:
                lane.capture()

    def capture_moments(self) -> None:
        """Take the moments that were there at attach, which are the same on all workers."""
        for lane in self.moment_lanes or []:
            lane.capture()

    # -- what others need -------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Outer state by name, the tensors themselves."""
        return {
            f"{lane.fragment.key.rsplit('/', 1)[0]}/{number}/{name}": tensor
            for number, lane in enumerate(self.lanes)
            for name, tensor in lane.state().items()
        }

    def passing(self) -> dict[str, Any]:
        """What a checkpoint holds besides outer state: the codec's state, and an exchange that has not landed yet."""
        codec = [dict(chunk.state) for chunk in self._chunks]
        if self._flight is None:
            return {"codec": codec, "flight": None}
        states = self._flight.arrive()
        said = [header.pack().tolist() for header in self._flight.headers]
        return {
            "codec": codec,
            "flight": {
                "said": said,
                "coefficients": list(astuple(self._coefficients())),
                "left_out": self._left_out,
                "codec": [dict(state) for state in states],
                "then": [lane.then for lane in self.lanes],
            },
        }

    def arrive(self) -> None:
        """Wait until the outer state is what the exchange under way makes it."""
        if self._flight is not None:
            self._flight.arrive()

    def numbers(self) -> dict[str, object]:
        """The numbers that a checkpoint holds."""
        sums = [int(lane.checksum) for lane in self.lanes]
        return {
            "block": self.block,
            "rho": self.rho,
            "ahead": self.ahead,
            "counts": self.counts,
            "sums": sums,
            "workers": self.workers,
            "norms": self._norms.state() if self._norms is not None else [],
        }

    def load(self, state: dict[str, Tensor], numbers: dict[str, Any], passing: dict[str, Any]) -> None:
        """Put outer state back, after the optimizers' own; makes the moments' lanes where the saved run had them."""
        self.block, self.rho, self.ahead = numbers["block"], numbers["rho"], numbers["ahead"]
        self._load_norms(numbers)
        self.counts = list(numbers["counts"])
        self._begun_with, self._flight, self._chunks = None, None, []
        for lane in self.lanes:
            lane.held = False
        if len(numbers["sums"]) < len(self.lanes):  # a run goes back to before the optimizers had any state
            self.moment_lanes = None
        if self.moment_lanes is None and len(numbers["sums"]) > len(self.lanes):
            self.moment_lanes = self._make_moment_lanes()
        for lane, checksum in zip(self.lanes, numbers["sums"], strict=True):
            lane.checksum.fill_(checksum)
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        if passing["codec"]:
            self.prepare()
            for chunk, kept in zip(self._chunks, passing["codec"], strict=True):
                chunk.state = restored(kept, chunk.device)
        if passing["flight"] is not None:
            self._resume_flight(passing["flight"])

    def _load_norms(self, numbers: dict[str, Any]) -> None:
        """A run that was saved without a guard has none to give."""
        if self._norms is not None:
            self._norms.load(numbers.get("norms", []))

    def _resume_flight(self, saved: dict[str, Any]) -> None:
        self._left_out = saved["left_out"]
        self._begun_with = Coefficients(*saved["coefficients"])
        for lane, then in zip(self.lanes, saved["then"], strict=True):
            lane.then = then.to(lane.device, copy=True) if then is not None else None
        summary = ExchangeSummary(tuple(Header.unpack(row) for row in saved["said"]))
        kept = [restored(state, chunk.device) for chunk, state in zip(self._chunks, saved["codec"], strict=True)]
        arrived = list(zip(self._chunks, kept, strict=True))
        self._flight = InFlightExchange.arrived(self._exchanger, summary, arrived)

    # -- from another number of workers -----------------------------------------------------------

    def misfit(self, outer: dict[str, Tensor]) -> str:
        """What of saved outer state does not fit the parameters and buffers here; nothing where all does."""
        for name, tensor in self.state().items():
            if name in outer and outer[name].shape != tensor.shape:
                return f"{name} has {tensor.numel()} elements here and {outer[name].numel()} in the checkpoint"
        names = {name.split("/")[0] for name in outer.keys() ^ self.state().keys()}
        own = {lane.fragment.key.split("/")[0] for lane in [*self.parameter_lanes, *self.buffer_lanes]}
        return f"the trained {', '.join(sorted(names & own))} are others" if names & own else ""

    def start(self) -> None:
        """Begin the first block from the model and the optimizers' state as they are, the same on all workers."""
        self.block, self.rho, self.ahead = 0, 0.0, 0.0
        self._renew(any(len(optimizer.state) for optimizer, _ in self._owned))
        self.capture()
        self._sum_anew()

    def renumber(self, workers: int) -> None:
        """Others have left or come: gains follow N, codecs begin anew, and what all hold is compared once more.

        The block under way keeps the start that it had.
        """
        self.workers = workers
        self._fit()
        if self._begun_with is not None:  # it is exchanged among these now
            self._begun_with = None
            self._begun_with = self._coefficients()
        if self._norms is not None:
            self._norms.mix()
        for chunk in self._chunks:
            chunk.state = {}
        self._sum_anew()

    def join(self, outer: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Begin in the middle of a block that others are in, from their outer state; after the optimizers' own."""
        self.regroup(outer, numbers, None, ahead=numbers["ahead"])

    def regroup(
        self,
        outer: dict[str, Tensor],
        numbers: dict[str, Any],
        said: list[list[int]] | None,
        ahead: float | None = None,
    ) -> None:
        """Begin a new block from the outer state that another number of workers left; after the optimizers' own.

        Args:
            outer: what `state` gave.
            numbers: what `numbers` gave.
            said: the headers of an exchange that had come and had not landed yet: it is in `outer` already.
            ahead: the look-ahead of the block's start; None: what it is for as many workers as there are now.
        """
        self.block, self.rho, self.ahead = numbers["block"], numbers["rho"], numbers["ahead"]
        self._load_norms(numbers)
        counts = list(numbers["counts"])
        if said is not None:
            self._count_in(
                ExchangeSummary(tuple(Header.unpack(row) for row in said)), numbers.get("workers", len(said)), counts
            )
        if ahead is None:
            ahead = self._coefficients().momentum if self.block else 0.0
        self.ahead = ahead
        met = len(numbers["sums"]) > len(self.parameter_lanes) + len(self.buffer_lanes)  # moments had been exchanged
        self._renew(met)
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(outer[name])
            for lane in self.lanes:
                lane.restore()
        self._begin_optimizers(counts, met)
        self._sum_anew()

    def _renew(self, moments: bool) -> None:
        """No exchange is under way, and codecs remember nothing."""
        self._chunks, self._flight, self._left_out = [], None, False
        self.moment_lanes = self._make_moment_lanes() if moments else None
        for lane in self.lanes:
            lane.fragment.refresh()

    def _count_in(self, summary: ExchangeSummary, workers: int, counts: list[float]) -> None:
        """Bring the numbers to where an exchange among so many workers brought the outer state."""
        if summary.weight == 0:
            return
        c = self._rule.coefficients(self.block + 1, workers, self.ahead)
        self.rho, ahead = self._rule.merging.equivalent_minibatches(self.rho, summary.tau, c)
        self.block += 1
        for number, choice in enumerate(self.choices):
            counts[number] += summary.tau + (ahead if choice == "compensate" else 0.0)

    def _begin_optimizers(self, counts: list[float], met: bool) -> None:
        """What the optimizers have at the start of a block: what is kept beyond it, and nothing of one under way."""
        for number, ((optimizer, named), choice) in enumerate(zip(self._owned, self.choices, strict=True)):
            parameters: list[Tensor] = [p for _, p in named]
            if choice == "compensate" and met:
                set_step_count(optimizer, parameters, counts[number])
            elif choice in ("compensate", "reset"):
                reset_state(optimizer, parameters)
                counts[number] = 0.0
            else:
                counts[number] = step_count(optimizer, parameters)
        self.counts = counts

    def _sum_anew(self) -> None:
        """The checksums of what all have taken over, so that the next exchange compares it."""
        for lane in self.lanes:
            lane.checksum.zero_()
            for tensor in lane.state().values():
                fold(lane.checksum, tensor)


def restored(saved: State, device: torch.device) -> State:
    """A codec's state out of a checkpoint, in memory that torch has laid out itself."""
    return {name: tensor.to(device, copy=True) for name, tensor in saved.items()}


def _decay_of(optimizer: Optimizer, place: int, moment: Moment) -> Callable[[], float]:
    return lambda: moment.decay(optimizer.param_groups[place])
