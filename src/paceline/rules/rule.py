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

A recipe is a named rule (:mod:`paceline.rules.recipes`). The code that runs a rule knows no method by name:
it asks the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from torch.optim import LBFGS, Optimizer, SparseAdam

from paceline.core.parse import Checked, fits, is_number
from paceline.core.world import World
from paceline.errors import RuleError, UnsupportedError
from paceline.rules.codec import Codec, Dense
from paceline.rules.outer import AdaDelay, Arrival, Average, DelayCompensated, Elastic, FrozenAdam, Outer, TunedMomentum
from paceline.rules.outer.base import Coefficients
from paceline.rules.outer.moving_average import MovingAverage
from paceline.rules.payload import Delta, FirstMoment, Gradient, Parameters, Payload
from paceline.rules.schedule import Bounded, EveryBlock, EveryStep, Paced, Schedule
from paceline.rules.topology import Flat, Sharded, Topology

T = TypeVar("T")
ON_GRADIENTS = (AdaDelay, DelayCompensated, TunedMomentum)
"""Outer steps that are defined for gradients only."""


def _narrowed(choice: str, kind: type[T], rules: str) -> T:
    """A property: this choice of a rule, which has to be a `kind`; `rules` says which rules have one."""

    def read(rule: Rule) -> T:
        part = getattr(rule, choice)
        assert isinstance(part, kind)
        return part

    return property(read, doc=f"The {choice} of {rules}.")  # type: ignore[return-value]


class RecipeCall(str):
    """The name of a recipe, with the arguments of its call; it compares as the name alone."""

    arguments: Mapping[str, Any]

    def __new__(cls, name: str, arguments: Mapping[str, Any] | None = None) -> RecipeCall:
        call = super().__new__(cls, name)
        call.arguments = arguments or {}
        return call


_NO_BOUND = "; there is no bound on the loss any more: take auto; it chooses by the network and the length of the run"


@dataclass(frozen=True)
class BlockSettings(Checked):
    """Settings of rules whose workers exchange blocks together; other rules have the defaults.

    Attributes:
        within: "" where every process is a worker; "host" where the processes of a host make synchronous steps together
            and are one worker, and blocks are exchanged between hosts.
        ema: b of the moving average of the global model that is exported (:mod:`paceline.rules.outer.moving_average`);
            0 exports the global model itself.
        alone: whether a single worker ends its blocks with the outer step, too; else it is the user's program.
        rate_exponent: s, where each of k workers has k^s times the local learning rate of one.
        even: whether all make equally many minibatches in a block; else as many as end together
            (:mod:`paceline.rules.schedule.uneven`).
    """

    checks: ClassVar = {
        "within": fits(lambda one: one in ("", "host"), '"" or "host"', _NO_BOUND),
        "ema": fits(lambda one: is_number(one) and 0 <= one < 1, "a number from 0 (no average) to below 1"),
        "rate_exponent": fits(lambda one: is_number(one) and 0 <= one <= 1, "a number from 0 to 1"),
    }

    within: str = ""
    ema: float = 0.0
    alone: bool = False
    rate_exponent: float = 0.0
    even: bool = True

    def check(self, schedule: Schedule) -> None:
        """Refuse an average or an outer step of blocks under a schedule that has none."""
        if self.ema and not schedule.exchanges_blocks:
            raise RuleError(
                f"ema={self.ema!r} averages the models after blocks, and {_name(schedule)} has none; use ema=0"
            )
        if self.alone is not False and not (self.alone is True and schedule.exchanges_blocks):
            raise RuleError(
                f"alone must be False, or True for rules that exchange blocks together, got {self.alone!r} with "
                f"{_name(schedule)}"
            )

    @property
    def texts(self) -> list[str]:
        """What the text of a rule shows of them."""
        later = {"ema": self.ema, "alone": self.alone, "rate_exponent": self.rate_exponent}
        shown = [f"{name}={value!r}" for name, value in later.items() if value]
        shown += [] if self.even else ["even=False"]
        return [repr(self.within), *shown] if self.within else shown


@dataclass(frozen=True)
class Rule:
    """A parallel training method.

    >>> from paceline import Rule
    >>> from paceline.rules.outer import BlockMomentum
    >>> from paceline.rules.payload import Delta
    >>> from paceline.rules.schedule import EveryBlock
    >>> rule = Rule(EveryBlock(16), Delta(), outer=BlockMomentum(momentum=0.75, lr=1.0))
    >>> rule.text()[:50]
    'custom(EveryBlock(period=16, warmup=0, fragments=1'

    Attributes:
        schedule: `EveryStep()`, `EveryBlock(period, warmup)` or `Paced(..)`; `Bounded(staleness, period)` where each
            worker exchanges by itself.
        payload: `Gradient()`, `FirstMoment(warmup)`, `Delta(local_state)` or `Parameters()`.
        codec: `Dense()`, or one of :mod:`paceline.rules.codec`.
        topology: `Flat(chunks)`, `Ordered(chunks)` or `Hierarchical(dimensions)`; `Sharded(piece)` with `Bounded`.
        outer: `Average()`, `BlockMomentum(...)`, `Nesterov(...)` or `FrozenAdam()`; with `Bounded` one that takes each
            push by itself (:mod:`paceline.rules.outer.arrival`).
        settings: of rules whose workers exchange blocks together.
        name: what messages call it; a `RecipeCall` where a recipe built it.
    """

    schedule: Schedule = field(default_factory=EveryBlock)
    payload: Payload = field(default_factory=Delta)
    codec: Codec = field(default_factory=Dense)
    topology: Topology | Sharded = field(default_factory=Flat)
    outer: Outer | Arrival = field(default_factory=Average)
    settings: BlockSettings = field(default_factory=BlockSettings)
    name: str = "custom"

    def __post_init__(self) -> None:
        self.settings.check(self.schedule)
        _check_combination(self)
        if self.schedule.workers_meet:
            _check_together(self)
        else:
            _check_alone(self)

    def text(self) -> str:
        """The rule as one writes it on the command line."""
        if self.name == "custom":
            parts = (self.schedule, self.payload, self.codec, self.topology, self.outer)
            return f"custom({', '.join([*map(repr, parts), *self.settings.texts])})"
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What the recipe was called with; only for `text`."""
        return self.name.arguments if isinstance(self.name, RecipeCall) else {}

    def coefficients(self, block: int, workers: float, ahead: float, diversity: float = 1.0) -> Coefficients:
        """The numbers of block `block` (the first is 1).

        Args:
            block: its number.
            workers: N.
            ahead: the look-ahead with which it began.
            diversity: A of the blocks before.
        """
        return Coefficients(
            momentum=self.merging.momentum_at(block, workers),
            lr=self.merging.lr_at(block, workers),
            ahead=ahead,
            next_momentum=self.merging.momentum_at(block + 1, workers),
            diversity=diversity,
            block=block,
        )

    @cached_property  # isinstance of a protocol costs much, compared with a small model's step
    def merging(self) -> Outer:
        """The outer of a rule whose workers exchange together, and the average of its models if the rule has one."""
        assert not isinstance(self.outer, Arrival)
        return MovingAverage(self.outer, self.settings.ema) if self.settings.ema else self.outer

    @cached_property
    def arrival(self) -> Arrival:
        """The outer of an asynchronous rule."""
        assert isinstance(self.outer, Arrival)
        return self.outer

    @property
    def center_pull(self) -> Elastic | None:
        """How worker and center pull each other; None where a push is a gradient or a delta."""
        return self.outer if isinstance(self.outer, Elastic) else None

    @property
    def follows_diversity(self) -> bool:
        """Whether the outer step, or the number of workers, follows the diversity of the workers' displacements."""
        grow = self.schedule.grow
        return bool(getattr(self.outer, "amplify", 0.0)) or (grow is not None and grow.measures)

    def rate_factor(self, workers: int) -> float:
        """What the local learning rate of one worker is multiplied by on each of k; 1 where blocks are not merged."""
        grow = self.schedule.grow
        exponent = self.settings.rate_exponent if grow is None else grow.rate_exponent
        return float(workers**exponent) if self.schedule.exchanges_blocks else 1.0

    @property
    def common(self) -> Topology:
        """The topology of a rule whose workers exchange together."""
        assert not isinstance(self.topology, Sharded)
        return self.topology

    sharded = _narrowed("topology", Sharded, "an asynchronous rule")
    blocks = _narrowed("schedule", EveryBlock, "a rule whose workers exchange blocks together")
    paced = _narrowed("schedule", Paced, "a rule whose period follows measured times")
    bounded = _narrowed("schedule", Bounded, "an asynchronous rule")
    delta = _narrowed("payload", Delta, "a rule that exchanges displacements")

    # -- what follows from several choices --------------------------------------------------------

    @property
    def steps_with_gradients(self) -> bool:
        """Whether gradients are exchanged at all: every step, in a warm-up, or within a host."""
        return not self.payload.spans_block or self.schedule.warmup > 0 or bool(self.settings.within)

    def exchanges_among(self, workers: int) -> bool:
        """Whether so many workers exchange at all."""
        return workers > 1 or self.settings.alone

    @property
    def steps_at_owners(self) -> bool:
        """Whether the owners of the shards make the optimizer's steps, and not the workers."""
        return not self.schedule.workers_meet and not self.payload.spans_block

    @property
    def makes_the_step(self) -> bool:
        """Whether the rule makes the optimizer's step itself, in place of the program's optimizer."""
        return self.steps_at_owners or self.payload.moments_after is not None

    @property
    def gradient_codec(self) -> Codec:
        """How gradients are written: densely where they are those of a warm-up, or of a host."""
        return Dense() if self.payload.spans_block else self.codec

    # -- what the rule cannot serve ---------------------------------------------------------------

    def check_growth(self, elastic: bool) -> None:
        """Refuse a number of workers that grows where all are there from the start."""
        if self.schedule.grow is not None and not elastic:
            raise UnsupportedError(
                f"{self.text()}: the number of workers of this run is fixed, and grow= needs workers that join it "
                "later; start an elastic run (paceline run --elastic MIN:MAX), or leave grow out"
            )

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that the rule cannot serve."""
        for optimizer in optimizers:
            name, hidden = type(optimizer).__name__, isinstance(optimizer, LBFGS)
            if self.steps_with_gradients and (hidden or isinstance(optimizer, SparseAdam)):
                why = "computes gradients inside its step" if hidden else "wants sparse gradients"
                raise UnsupportedError(
                    f"{name} {why}, which {self.text()} cannot exchange; use a rule that exchanges blocks (averaging, "
                    "bmuf, diloco) without warm-up, or another optimizer"
                )
            self.payload.check(optimizer)
            if getattr(self.codec, "momentum", 0) and any(
                g.get("momentum") or g.get("betas") for g in optimizer.param_groups
            ):
                raise UnsupportedError(
                    f"{self.text()} keeps momentum itself, before it chooses what to send, and {name} keeps one too; "
                    "use SGD without momentum, or momentum=0 in the rule"
                )

    def check_swapping(self, optimizers: Sequence[Optimizer], world: World) -> None:
        """Refuse optimizers that swap the model's weights for evaluation (schedule-free ones), where workers' differ.

        What they swap in follows from their own state, in which every worker would have another one.
        """
        for optimizer in optimizers:
            swaps = callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
            if swaps and not self.schedule.is_lockstep(True):
                raise UnsupportedError(
                    world.sign(
                        f"{type(optimizer).__name__} swaps the model's weights in its eval() and train(), by a state "
                        f"of its own, which {self.text()} does not make common, so that each worker would evaluate and "
                        'save another model; take the rule "sync", under which all workers have one state, or another '
                        "optimizer"
                    )
                )


def _name(choice: object) -> str:
    return type(choice).__name__


def _check_combination(rule: Rule) -> None:
    """Refuse a rule that makes some choices of an asynchronous rule and not the others."""
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
    """Check the choices of a rule whose workers exchange together."""
    if isinstance(rule.payload, Parameters):
        raise RuleError(
            "Parameters is for elastic averaging, where each worker exchanges by itself; use Delta() for blocks, or "
            "Bounded(), Sharded() and Elastic()"
        )
    every_step = not rule.payload.spans_block
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
    if every_step and rule.settings.within:
        raise RuleError(f'within="{rule.settings.within}" is for rules that exchange blocks; use dimensions="hosts"')
    if not every_step and isinstance(rule.outer, FrozenAdam):
        raise RuleError("FrozenAdam applies Adam's first moment and needs FirstMoment() as the payload")


def _check_alone(rule: Rule) -> None:
    """Check the choices of an asynchronous rule."""
    payload, outer = rule.payload, rule.outer
    if rule.settings.within:
        raise RuleError(
            f'within="{rule.settings.within}" is for rules whose workers exchange blocks together; with '
            f'{_name(rule.schedule)} every process is a worker, use within=""'
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
