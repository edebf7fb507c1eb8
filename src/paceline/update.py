# SPDX-License-Identifier: Apache-2.0
"""Block payloads: gathers what travels after a block, exchanges it, applies it. Knows no method by name.

Gradient payloads are served by :mod:`paceline.gradient_update`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import NonFiniteError, UnsupportedError
from paceline.exchange import IN_FLIGHT, Exchanger, Header, Meeting, combine
from paceline.fragments import Modules, fragments
from paceline.lanes import (
    BufferLane,
    Lane,
    LaneChunk,
    MomentLane,
    Moves,
    ParameterLane,
    buffer_lanes,
)
from paceline.optimizers import (
    Moment,
    ensure_state,
    moments,
    parameter_state,
    reset_state,
    set_step_count,
    step_count,
)
from paceline.outer.base import Coefficients
from paceline.payload import Delta
from paceline.rule import Rule

SMALL_ELEMENTS = 1 << 18
"""An exchange of fewer elements than this goes in one chunk."""

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Work:
    """What a worker did since the last exchange.

    Attributes:
        minibatches: steps of the optimizer.
        total: the same since attach.
        factor: weight of the contribution, in parts of a full one.
        leaving: whether the worker has come to its end.
    """

    minibatches: int
    total: int
    factor: float = 1.0
    leaving: bool = False


def cut(numel: int, pieces: int) -> list[tuple[int, int]]:
    """Cut 0 .. numel into at most `pieces` ranges of one length, at offsets that suit every dtype."""
    if numel < SMALL_ELEMENTS or pieces == 1:
        return [(0, numel)]
    length = -(-numel // pieces // 64) * 64
    return [(begin, min(numel, begin + length)) for begin in range(0, numel, length)]


class BlockUpdate:
    """Block payloads: parameters, buffers and moments of one model under one rule.

    Args:
        rule: the rule.
        exchanger: the connection.
        model: the user's modules (for buffers).
        owned: (optimizer, its named parameters) pairs.
        state_device: where outer state lies; None for the parameters' own device.
    """

    def __init__(
        self,
        rule: Rule,
        exchanger: Exchanger,
        model: Modules,
        owned: list[tuple[Optimizer, Named]],
        state_device: torch.device | None,
    ) -> None:
        assert isinstance(rule.payload, Delta)
        self._rule, self._exchanger, self._owned, self._device = rule, exchanger, owned, state_device
        self.choices = [rule.payload.resolve(optimizer) for optimizer, _ in owned]
        self.block, self.rho, self.ahead = 0, 0.0, 0.0
        self.counts = [step_count(o, [p for _, p in named]) for o, named in owned]
        everything = [pair for _, named in owned for pair in named]
        self.parameter_lanes = [
            ParameterLane(fragment, rule.outer, self._coefficients, state_device)
            for fragment in fragments("parameters", everything)
        ]
        self.buffer_lanes = buffer_lanes(model, state_device)
        self.moment_lanes: list[MomentLane] | None = None  # made when the optimizers have made their state
        self._chunks: list[LaneChunk] = []
        self._minibatches = 0
        self._moves_of: tuple[Meeting, Moves] | None = None
        if any(len(optimizer.state) for optimizer, _ in owned):  # moments from before attach are a start too
            self.moment_lanes = self._make_moment_lanes()

    # -- the numbers of a block -------------------------------------------------------------------

    @property
    def workers(self) -> int:
        return self._exchanger.transport.world.size

    def _coefficients(self) -> Coefficients:
        return self._rule.coefficients(self.block + 1, self.workers, self.ahead)

    def _moves(self, meeting: Meeting) -> Moves:
        if self._moves_of is None or self._moves_of[0] is not meeting:
            c = self._coefficients()
            _, ahead = self._rule.outer.equivalent_minibatches(self.rho, meeting.tau, c)
            self._moves_of = (meeting, Moves(c, ahead))
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
        """All lanes as chunks; a few wire buffers for each dtype and device take turns."""
        pieces: list[tuple[Lane, int, int]] = []
        total = sum(lane.numel for lane in self.lanes)
        for lane in self.lanes:
            wanted = max(1, round(self._rule.topology.chunks * lane.numel / max(total, 1)))
            pieces += [(lane, begin, end) for begin, end in cut(lane.numel, wanted)]
        wires: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}
        longest: dict[tuple[torch.dtype, torch.device], int] = {}
        for lane, begin, end in pieces:
            key = (lane.dtype, self._exchanger.transport.wire_device(lane.device))
            longest[key] = max(longest.get(key, 0), end - begin)
        chunks = []
        for turn, (lane, begin, end) in enumerate(pieces):
            key = (lane.dtype, self._exchanger.transport.wire_device(lane.device))
            name = (*key, turn % IN_FLIGHT)
            if name not in wires:
                wires[name] = torch.zeros(longest[key], dtype=key[0], device=key[1])
            chunks.append(LaneChunk(lane, begin, end, wires[name], lambda: self._minibatches, self._moves))
        return chunks

    # -- the exchange -----------------------------------------------------------------------------

    def exchange(self, work: Work) -> Meeting:
        """End the block: exchange, apply, and start the next one from the result.

        Raises `NonFiniteError`, `DesyncError` or `MismatchError` with the outer state untouched, `PeerLostError`.
        """
        self.prepare()
        self._minibatches = work.minibatches
        finite = all(lane.fragment.finite() for lane in self.lanes)
        header = Header(
            sequence=self._exchanger.sequence + 1,
            kind=0,
            brings=work.minibatches > 0,
            leaving=work.leaving,
            finite=finite,
            minibatches=work.minibatches,
            presence=0,
            factor=work.minibatches / self._rule.schedule.period if finite else 0.0,
            total=work.total,
            checksum=self.checksum(),
        )
        try:
            meeting = self._exchanger.meet(header, lambda kind: self._chunks)
        except NonFiniteError:
            self._restart()
            raise
        if meeting.weight > 0:
            self._advance(meeting, finite)
        return meeting

    def checksum(self) -> int:
        """Of the state that the last exchange left, combined over the lanes; taken once."""
        total = combine(lane.checksum for lane in self.lanes)
        for lane in self.lanes:
            lane.checksum.zero_()
        return total

    def _advance(self, meeting: Meeting, finite: bool) -> None:
        moves = self._moves(meeting)
        self.rho, _ = self._rule.outer.equivalent_minibatches(self.rho, meeting.tau, moves.coefficients)
        self.ahead = moves.coefficients.next_momentum
        self.block += 1
        for number, ((optimizer, named), choice) in enumerate(zip(self._owned, self.choices, strict=True)):
            parameters: list[Tensor] = [p for _, p in named]
            if choice == "reset" or (choice == "keep" and not finite):
                reset_state(optimizer, parameters)
            elif choice in ("average", "compensate"):
                self.counts[number] += meeting.tau + (moves.ahead if choice == "compensate" else 0.0)
                set_step_count(optimizer, parameters, self.counts[number])

    def _restart(self) -> None:
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

    @property
    def global_lanes(self) -> list[ParameterLane | BufferLane]:
        """The lanes whose anchors are the global model."""
        return [*self.parameter_lanes, *self.buffer_lanes]

    def global_tensors(self) -> dict[str, Tensor]:
        """Name -> the global model's parameter or buffer, in the model's own dtype and shape; copies."""
        found: dict[str, Tensor] = {}
        for lane in self.global_lanes:
            found |= lane.fragment.unflatten(lane.anchor)
        return found

    def state(self) -> dict[str, Tensor]:
        """Outer state by name, the tensors themselves."""
        return {
            f"{lane.fragment.key.rsplit('/', 1)[0]}/{number}/{name}": tensor
            for number, lane in enumerate(self.lanes)
            for name, tensor in lane.state().items()
        }

    def numbers(self) -> dict[str, object]:
        """What a checkpoint holds besides tensors."""
        sums = [int(lane.checksum) for lane in self.lanes]
        return {"block": self.block, "rho": self.rho, "ahead": self.ahead, "counts": self.counts, "sums": sums}

    def load(self, state: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Put outer state back, after the optimizers' own; makes the moments' lanes where the saved run had them."""
        self.block, self.rho, self.ahead = numbers["block"], numbers["rho"], numbers["ahead"]
        self.counts = list(numbers["counts"])
        if self.moment_lanes is None and len(numbers["sums"]) > len(self.lanes):
            self.moment_lanes = self._make_moment_lanes()
            self._chunks = []
        for lane, checksum in zip(self.lanes, numbers["sums"], strict=True):
            lane.checksum.fill_(checksum)
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def _decay_of(optimizer: Optimizer, place: int, moment: Moment) -> Callable[[], float]:
    return lambda: moment.decay(optimizer.param_groups[place])
