# SPDX-License-Identifier: Apache-2.0
"""The rule: every parallel training method as five choices.

=========  ======================================  =====================================
choice     question                                here
=========  ======================================  =====================================
schedule   when do workers exchange?               :mod:`paceline.rules.schedule`
payload    what is exchanged?                      :mod:`paceline.rules.payload`
codec      how is it written on the wire?          :mod:`paceline.rules.codec`
topology   over which route?                       :mod:`paceline.rules.topology`
outer      how is the result applied?              :mod:`paceline.rules.outer`
=========  ======================================  =====================================

A recipe is a named rule (:mod:`paceline.rules.recipes`). The code that runs a rule knows no method by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paceline.communication.sockets import frames
from paceline.errors import RuleError
from paceline.rules.codec import Codec, Dense, Layout
from paceline.rules.outer import (
    AdaDelay,
    Arrival,
    Average,
    DelayCompensated,
    Elastic,
    FrozenAdam,
    Outer,
    TunedMomentum,
)
from paceline.rules.outer.base import Coefficients
from paceline.rules.payload import Delta, FirstMoment, Gradient, Parameters, Payload
from paceline.rules.schedule import Bounded, EveryBlock, EveryStep, Paced, Schedule
from paceline.rules.topology import Flat, Sharded, Topology

HEADER_BYTES = 80
"""What every exchange sends besides its payload, to each other worker (:mod:`paceline.update.exchange.exchanger`)."""
FOOTER_BYTES = 40
"""What an exchange of gradients sends besides, likewise (:mod:`paceline.update.engine.gradients.update`)."""
FRAME_BYTES = frames.HEADER_BYTES
"""What every piece sends besides its payload, to its owner and back, where workers exchange each by itself."""
ON_GRADIENTS = (AdaDelay, DelayCompensated, TunedMomentum)
"""What is defined for gradients alone."""


@dataclass(frozen=True)
class Rule:
    """A parallel training method.

    >>> from paceline import Rule
    >>> from paceline.rules.outer import BlockMomentum
    >>> from paceline.rules.payload import Delta
    >>> from paceline.rules.schedule import EveryBlock
    >>> rule = Rule(EveryBlock(16), Delta(), outer=BlockMomentum(momentum=0.75, lr=1.0))
    >>> rule.numbers(workers=4)["gain"]
    4.0
    >>> rule.bytes_per_block(workers=4, parameters=1_000_000)
    6000000

    Attributes:
        schedule: `EveryStep()`, `EveryBlock(period, warmup)` or `Paced(..)`; `Bounded(staleness, period)` where each
            worker exchanges by itself.
        payload: `Gradient()`, `FirstMoment(warmup)`, `Delta(local_state)` or `Parameters()`.
        codec: `Dense()`, or one of :mod:`paceline.rules.codec`.
        topology: `Flat(chunks)`, `Ordered(chunks)` or `Hierarchical(dimensions)`; `Sharded(piece)` with `Bounded`.
        within: "" where every process is a worker; "host" where the processes of a host make synchronous steps together
            and are one worker, and blocks are exchanged between hosts.
        outer: `Average()`, `BlockMomentum(...)`, `Nesterov(...)` or `FrozenAdam()`; with `Bounded` one that takes each
            push by itself (:mod:`paceline.rules.outer.arrival`).
        name: what messages call it.
        arguments: what a recipe was called with; only for `text`.
    """

    schedule: Schedule = field(default_factory=EveryBlock)
    payload: Payload = field(default_factory=Delta)
    codec: Codec = field(default_factory=Dense)
    topology: Topology | Sharded = field(default_factory=Flat)
    outer: Outer | Arrival = field(default_factory=Average)
    within: str = ""
    name: str = "custom"
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.within not in ("", "host"):
            raise RuleError(f'within must be "" or "host", got {self.within!r}')
        _check_company(self)
        if is_asynchronous(self):
            _check_alone(self)
        else:
            _check_together(self)

    def text(self) -> str:
        """The rule as one writes it on the command line."""
        if self.name == "custom":
            parts: list[Any] = [self.schedule, self.payload, self.codec, self.topology, self.outer]
            parts += [self.within] if self.within else []
            return "custom(" + ", ".join(repr(part) for part in parts) + ")"
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"

    def numbers(self, workers: int) -> dict[str, float | int | str]:
        """The numbers that this rule works with when N = `workers`, after any ramp."""
        if isinstance(self.schedule, EveryStep):
            return {"period": 1}
        if isinstance(self.schedule, Bounded):
            s = "any" if self.schedule.staleness is None else self.schedule.staleness
            known = {"period": self.schedule.period, "staleness": s, "overlap": self.schedule.overlap}
            return known | {"hold": self.schedule.hold} | self.arrival.numbers(workers)
        outer = self.merging
        eta, zeta = outer.momentum_at(1 << 30, workers), outer.lr_at(1 << 30, workers)
        found: dict[str, float | int | str] = {"period": self.schedule.period, "warmup": self.schedule.warmup}
        if self.schedule.fragments > 1 or self.schedule.overlap:
            found |= {"fragments": self.schedule.fragments, "overlap": self.schedule.overlap}
        if isinstance(self.schedule, Paced):
            found |= {"share": self.schedule.share, "longest": self.schedule.longest}
        if not isinstance(outer, Average):
            found |= {"momentum": eta, "lr": zeta, "gain": zeta / (1 - eta)}
            found["ramp"] = int(getattr(outer, "ramp", 0))
        assert isinstance(self.payload, Delta)
        found["local_state"] = self.payload.local_state
        if self.within:
            found["within"] = self.within
        return found

    def coefficients(self, block: int, workers: int, ahead: float) -> Coefficients:
        """The numbers of block `block` (the first is 1); `ahead` is the look-ahead with which it began."""
        return Coefficients(
            momentum=self.merging.momentum_at(block, workers),
            lr=self.merging.lr_at(block, workers),
            ahead=ahead,
            next_momentum=self.merging.momentum_at(block + 1, workers),
        )

    @cached_property  # what a protocol's isinstance costs is much, beside a small model's step
    def merging(self) -> Outer:
        """The outer of a rule whose workers exchange together."""
        assert not isinstance(self.outer, Arrival)
        return self.outer

    @cached_property  # what a protocol's isinstance costs is much, beside a small model's step
    def arrival(self) -> Arrival:
        """The outer of an asynchronous rule."""
        assert isinstance(self.outer, Arrival)
        return self.outer

    @property
    def common(self) -> Topology:
        """The topology of a rule whose workers exchange together."""
        assert not isinstance(self.topology, Sharded)
        return self.topology

    @property
    def sharded(self) -> Sharded:
        """The topology of an asynchronous rule."""
        assert isinstance(self.topology, Sharded)
        return self.topology

    def rides(self, moments: int = 2) -> bool:
        """Whether the local optimizer's so many moments travel with the parameters; with "fitting" Adam's two do."""
        if not isinstance(self.payload, Delta):
            return False
        return self.payload.local_state in ("average", "compensate") or (
            self.payload.local_state == "fitting" and moments == 2
        )

    def bytes_per_block(
        self,
        workers: int,
        parameters: int | Layout,
        buffers: int = 0,
        moments: int = 2,
        *,
        rank: int = 0,
        hosts: Sequence[str] | None = None,
        exchange: int = 1 << 30,
    ) -> int:
        """Bytes that one worker sends for one exchange of every parameter (a block, or a step), without headers.

        Args:
            workers: N.
            parameters: trainable parameters as they lie in the flat tensor, or their number of 32-bit elements.
            buffers: elements of averaged buffers, likewise (a whole number of 64 bits counts as two); always dense.
            moments: moments of the local optimizer, where they travel: 2 for Adam, 1 for SGD with momentum; dense.
            rank: the worker, where workers send different numbers of bytes.
            hosts: each worker's host, for routes that ask; None for one worker a host.
            exchange: which exchange it is, for codecs that begin otherwise than they go on.
        """
        layout = Layout.vector(parameters) if isinstance(parameters, int) else parameters
        hosts = [str(k) for k in range(workers)] if hosts is None else hosts
        besides = (moments * layout.numel if self.rides(moments) else 0) + buffers
        sent = self.topology.bytes_sent(self.codec.at(exchange), layout, hosts, rank)
        return sent + self.topology.bytes_sent(Dense(), Layout.vector(besides), hosts, rank)

    def overhead_bytes(self, workers: int, parameters: int | Layout | None = None, *, rank: int = 0) -> int:
        """Bytes of headers and footers that one worker sends for one exchange.

        Args:
            workers: N.
            parameters: as for `bytes_per_block`, where the rule is asynchronous: each piece has a header. None for a
                model of one piece an owner, which has the fewest.
            rank: the worker, likewise.
        """
        if isinstance(self.topology, Sharded):
            numel = parameters.numel if isinstance(parameters, Layout) else parameters
            frames = 2 * (workers - 1) if numel is None else self.topology.frames_sent(numel, workers, rank)
            apart = isinstance(self.payload, Gradient) and self.schedule.overlap > 0  # pushed, and pulled later
            return FRAME_BYTES * frames * (2 if apart else 1)
        return (HEADER_BYTES + (FOOTER_BYTES if isinstance(self.schedule, EveryStep) else 0)) * (workers - 1)

    def bytes_formula(self) -> str:
        """The formula behind `bytes_per_block`."""
        what = "4 (1 + M) P" if self.rides() else "4 P"
        means = "P parameters, M moments (Adam 2)" if self.rides() else "P parameters"
        often = "step" if isinstance(self.payload, (Gradient, FirstMoment)) else "block"
        if isinstance(self.topology, Sharded):
            return (
                f"2 (N-1)/N * {what} bytes a {often} from each worker, pushed and answered, {means}; "
                f"a header of {FRAME_BYTES} bytes a piece"
            )
        small = self.overhead_bytes(2)
        if not self.codec.exact:
            layout = Layout.of([(1000, 1000)])
            sent = self.bytes_per_block(4, layout, moments=2) / layout.numel
            return (
                f"{sent:.3g} P bytes a {often} from each of 4 workers for a matrix of 1000 x 1000 "
                f"({self.codec.describe(4)}), {means}; a header of {small} (N-1) bytes"
            )
        return f"2 (N-1)/N * {what} bytes a {often} from each worker, {means}; a header of {small} (N-1) bytes"


def steps_with_gradients(rule: Rule) -> bool:
    """Whether gradients are exchanged at all: every step, in a warm-up, or within a host."""
    every_step = isinstance(rule.payload, (Gradient, FirstMoment))
    return every_step or rule.schedule.warmup > 0 or bool(rule.within)


def is_block(rule: Rule) -> bool:
    """Whether the workers exchange blocks together (and not gradients, nor each by itself)."""
    return isinstance(rule.schedule, EveryBlock)


def is_asynchronous(rule: Rule) -> bool:
    """Whether each worker exchanges by itself, with the owners of the pieces."""
    return isinstance(rule.schedule, Bounded)


def _name(choice: object) -> str:
    return type(choice).__name__


def _check_company(rule: Rule) -> None:
    """The three choices of an asynchronous rule, all or none."""
    single = {
        "schedule": isinstance(rule.schedule, Bounded),
        "topology": isinstance(rule.topology, Sharded),
        "outer": isinstance(rule.outer, Arrival),
    }
    if len(set(single.values())) > 1:
        have = ", ".join(_name(getattr(rule, choice)) for choice in single)
        raise RuleError(
            f"{have} do not go together: workers that exchange each by itself need the schedule Bounded, the topology "
            "Sharded and an outer that takes each push by itself (Sum, Share, ..); workers that exchange together none "
            "of these"
        )


def _check_together(rule: Rule) -> None:
    """The choices of a rule whose workers exchange together."""
    if isinstance(rule.payload, Parameters):
        raise RuleError(
            "Parameters is for elastic averaging, where each worker exchanges by itself; use Delta() for blocks, or "
            "Bounded(), Sharded() and Elastic()"
        )
    every_step = isinstance(rule.payload, (Gradient, FirstMoment))
    if every_step != isinstance(rule.schedule, EveryStep):
        raise RuleError(
            f"{_name(rule.payload)} does not go with {_name(rule.schedule)}: "
            "gradients and moments are exchanged every step, deltas every block"
        )
    fitting = FrozenAdam if isinstance(rule.payload, FirstMoment) else Average
    if every_step and type(rule.outer) is not fitting:
        raise RuleError(
            f"what is exchanged every step goes to the optimizer's step as the mean, not through "
            f"{_name(rule.outer)}; use {fitting.__name__}()"
        )
    if every_step and rule.within:
        raise RuleError(f'within="{rule.within}" is for rules that exchange blocks; use dimensions="hosts"')
    if not every_step and isinstance(rule.outer, FrozenAdam):
        raise RuleError("FrozenAdam applies Adam's first moment and needs FirstMoment() as the payload")


def _check_alone(rule: Rule) -> None:
    """The choices of a rule whose workers exchange each by itself."""
    payload, outer = rule.payload, rule.outer
    if rule.within:
        raise RuleError(
            f'within="{rule.within}" is for rules whose workers exchange blocks together; with {_name(rule.schedule)} '
            'every process is a worker, use within=""'
        )
    if not isinstance(rule.codec, Dense):
        raise RuleError(f"pushes are written dense so far, not as {_name(rule.codec)}; use Dense()")
    if isinstance(payload, FirstMoment):
        raise RuleError("FirstMoment is exchanged in lockstep, not with Bounded; use Gradient()")
    if isinstance(payload, Parameters) != isinstance(outer, Elastic):
        raise RuleError(f"{_name(payload)} does not go with {_name(outer)}: Parameters() and Elastic() need each other")
    if isinstance(payload, Gradient) and rule.schedule.period != 1:
        raise RuleError(
            f"gradients are exchanged every minibatch, got period {rule.schedule.period}; use period=1, or Delta()"
        )
    if isinstance(outer, ON_GRADIENTS) and not isinstance(payload, Gradient):
        raise RuleError(f"{_name(outer)} is defined for gradients, not for {_name(payload)}; use Gradient()")
    if isinstance(payload, Delta) and (payload.local_state != "keep" or payload.mixing is not None):
        raise RuleError(
            f"with {_name(rule.schedule)} each worker keeps its optimizer's state and its progress, got "
            f"local_state={payload.local_state!r}, mixing={payload.mixing!r}; use Delta('keep')"
        )
