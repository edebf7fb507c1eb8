# SPDX-License-Identifier: Apache-2.0
"""Floor 3: the rule, which is every parallel training method as five choices.

=========  ======================================  =====================================
choice     question                                here
=========  ======================================  =====================================
schedule   when do workers exchange?               :mod:`paceline.schedule`
payload    what is exchanged?                      :mod:`paceline.payload`
codec      how is it written on the wire?          :mod:`paceline.codec`
topology   over which route?                       :mod:`paceline.topology`
outer      how is the result applied?              :mod:`paceline.outer`
=========  ======================================  =====================================

A recipe is a named rule (:mod:`paceline.recipes`). The code that runs a rule knows no method by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.codec import Codec, Dense, Layout
from paceline.errors import RuleError
from paceline.outer import Average, FrozenAdam, Outer
from paceline.outer.base import Coefficients
from paceline.payload import Delta, FirstMoment, Gradient, Payload
from paceline.schedule import EveryBlock, EveryStep, Schedule
from paceline.topology import Flat, Topology

HEADER_BYTES = 80
"""What every exchange sends besides its payload, to each other worker (:mod:`paceline.exchange`)."""
FOOTER_BYTES = 40
"""What an exchange of gradients sends besides, likewise (:mod:`paceline.gradient_update`)."""


@dataclass(frozen=True)
class Rule:
    """A parallel training method.

    Attributes:
        schedule: `EveryStep()` or `EveryBlock(period, warmup)`.
        payload: `Gradient()`, `FirstMoment(warmup)` or `Delta(local_state)`.
        codec: `Dense()`, or one of :mod:`paceline.codec`.
        topology: `Flat(chunks)`, `Ordered(chunks)` or `Hierarchical(dimensions)`.
        within: "" where every process is a worker; "host" where the processes of a host make synchronous steps together
            and are one worker, and blocks are exchanged between hosts.
        outer: `Average()`, `BlockMomentum(...)`, `Nesterov(...)` or `FrozenAdam()`.
        name: what messages call it.
        arguments: what a recipe was called with; only for `text`.
    """

    schedule: Schedule = field(default_factory=EveryBlock)
    payload: Payload = field(default_factory=Delta)
    codec: Codec = field(default_factory=Dense)
    topology: Topology = field(default_factory=Flat)
    outer: Outer = field(default_factory=Average)
    within: str = ""
    name: str = "custom"
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        every_step = isinstance(self.payload, (Gradient, FirstMoment))
        if every_step != isinstance(self.schedule, EveryStep):
            raise RuleError(
                f"{type(self.payload).__name__} does not go with {type(self.schedule).__name__}: "
                "gradients and moments are exchanged every step, deltas every block"
            )
        fitting = FrozenAdam if isinstance(self.payload, FirstMoment) else Average
        if every_step and type(self.outer) is not fitting:
            raise RuleError(
                f"what is exchanged every step goes to the optimizer's step as the mean, not through "
                f"{type(self.outer).__name__}; use {fitting.__name__}()"
            )
        if self.within not in ("", "host"):
            raise RuleError(f'within must be "" or "host", got {self.within!r}')
        if every_step and self.within:
            raise RuleError(f'within="{self.within}" is for rules that exchange blocks; use dimensions="hosts"')
        if not every_step and isinstance(self.outer, FrozenAdam):
            raise RuleError("FrozenAdam applies Adam's first moment and needs FirstMoment() as the payload")

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
        eta, zeta = self.outer.momentum_at(1 << 30, workers), self.outer.lr_at(1 << 30, workers)
        found: dict[str, float | int | str] = {"period": self.schedule.period, "warmup": self.schedule.warmup}
        if self.schedule.fragments > 1 or self.schedule.overlap:
            found |= {"fragments": self.schedule.fragments, "overlap": self.schedule.overlap}
        if not isinstance(self.outer, Average):
            found |= {"momentum": eta, "lr": zeta, "gain": zeta / (1 - eta)}
            found["ramp"] = int(getattr(self.outer, "ramp", 0))
        assert isinstance(self.payload, Delta)
        found["local_state"] = self.payload.local_state
        if self.within:
            found["within"] = self.within
        return found

    def coefficients(self, block: int, workers: int, ahead: float) -> Coefficients:
        """The numbers of block `block` (the first is 1); `ahead` is the look-ahead with which it began."""
        return Coefficients(
            momentum=self.outer.momentum_at(block, workers),
            lr=self.outer.lr_at(block, workers),
            ahead=ahead,
            next_momentum=self.outer.momentum_at(block + 1, workers),
        )

    @property
    def rides(self) -> bool:
        """Whether the local optimizer's moments travel with the parameters."""
        return isinstance(self.payload, Delta) and self.payload.local_state in ("average", "compensate")

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
        besides = (moments * layout.numel if self.rides else 0) + buffers
        sent = self.topology.bytes_sent(self.codec.at(exchange), layout, hosts, rank)
        return sent + self.topology.bytes_sent(Dense(), Layout.vector(besides), hosts, rank)

    def overhead_bytes(self, workers: int) -> int:
        """Bytes of headers and footers that one worker sends for one exchange."""
        return (HEADER_BYTES + (FOOTER_BYTES if isinstance(self.schedule, EveryStep) else 0)) * (workers - 1)

    def bytes_formula(self) -> str:
        """The formula behind `bytes_per_block`."""
        what = "4 (1 + M) P" if self.rides else "4 P"
        means = "P parameters, M moments (Adam 2)" if self.rides else "P parameters"
        often = "step" if isinstance(self.schedule, EveryStep) else "block"
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
    return not is_block(rule) or rule.schedule.warmup > 0 or bool(rule.within)


def is_block(rule: Rule) -> bool:
    """Whether the rule exchanges blocks (and not gradients)."""
    return isinstance(rule.schedule, EveryBlock)
