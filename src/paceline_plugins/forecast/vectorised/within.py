# SPDX-License-Identifier: Apache-2.0
"""Stacked workers under a bound on the held-out loss: what would it give up? (:mod:`paceline.tuning.loss_bound`)

Either as in a run, by the curve of the held-out loss; or by branches: from one state the workers train on under the
present period and under the longer one, with the same samples, and the longer one is kept if it costs at most its
share. A branch has 2 * `SETTLE` blocks of the longer period, of which the second half counts. What is not kept is lost,
and counted. The workers have no network, so the period that measured times would want is given.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UnsupportedError
from paceline.rules.recipes import make_rule
from paceline.rules.rule import Rule
from paceline.tuning.held_out import Row
from paceline.tuning.loss_bound import SETTLE, LossBound, Place
from paceline.tuning.loss_curve import Excess
from paceline_plugins.forecast.vectorised.grown import stack
from paceline_plugins.forecast.vectorised.vectorised import Batch, Loss, StackedWorkers, check_stackable
from paceline_plugins.forecast.vectorised.vectorised_blocks import check_rule

CONFIDENCE = 0.95
"""Of what a branch costs at most."""
LEAST_PAIRS = 4
"""The fewest held-out losses of a branch."""


@dataclass(frozen=True)
class WithinResult:
    """Result of a training under a bound.

    Attributes:
        parameters: name -> the global model's parameter, in the model's shape and dtype.
        settings: (minibatches of all workers, period, workers) from there on, in order.
        steps: minibatches that were made one after another.
        exchanges: of all blocks.
        spent: what the kept changes cost at most, a share of the loss.
        told: what was decided, in sentences.
        extra: minibatches of all workers in branches that were not kept.
        buffers: name -> the global model's buffer, likewise.
    """

    parameters: dict[str, Tensor]
    settings: tuple[tuple[int, int, int], ...]
    steps: int
    exchanges: int
    spent: float
    told: tuple[str, ...]
    extra: int
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Program:
    """What is trained, and how often it is judged; as of `simulate_within`."""

    held_out: Callable[[dict[str, Tensor]], float]
    every: int
    rate: Callable[[int], float] | None
    largest_gradient: float | None


@dataclass
class _Training:
    """Workers at one place of their training.

    Attributes:
        program: what is trained.
        group: the workers.
        rule: at present, without growth.
        common: number of workers -> factor of their learning rates.
        done: minibatches of all workers.
        steps, exchanges: made one after another.
        rows: held-out losses that were not read yet.
        judged: minibatches from which on it is judged after every so many; 0 for as often as the program says.
    """

    program: _Program
    group: StackedWorkers
    rule: Rule
    common: Callable[[int], float]
    done: int = field(default=0, init=False)
    steps: int = field(default=0, init=False)
    exchanges: int = field(default=0, init=False)
    rows: list[Row] = field(default_factory=list, init=False)
    judged: tuple[int, int] = field(default=(0, 0), init=False)

    def block(self, source: Iterator[Batch]) -> bool:
        """Make a block; whether there was data enough."""
        group, program = self.group, self.program
        while len(step := list(islice(source, group.number))) == group.number:
            height = 1.0 if program.rate is None else program.rate(self.done)
            group.step(stack(step), height * self.common(group.number), program.largest_gradient)
            self.done, self.steps = self.done + group.number, self.steps + 1
            if not group.in_block:
                self.exchanges += 1
                since, every = self.done - self.judged[0], self.judged[1] or program.every
                if since // every > (since - self.rule.schedule.period * group.number) // every:
                    self.rows.append((self.done, program.held_out(group.global_model()), height))
                return True
        return False

    @property
    def setting(self) -> tuple[int, int]:
        """(period, workers)."""
        return self.rule.schedule.period, self.group.number

    def follow(self, period: int) -> None:
        """Continue with this period."""
        if period == self.rule.schedule.period:
            return
        self.rule = replace(self.rule, schedule=replace(self.rule.paced, period=period))
        self.group.retune(self.rule)

    def branches(self, period: int, batches: list[Batch]) -> tuple[_Training, _Training]:
        """The training after these minibatches, as it is and with another period."""
        both = math.lcm(period, self.rule.schedule.period) * self.group.number
        every = both * math.ceil(self.program.every / both)  # where blocks of both end
        found = self, copy.deepcopy(self)
        found[1].follow(period)
        for one in found:
            source, one.rows, one.judged = iter(batches), [], (one.done, every)
            while one.block(source):
                pass
            one.judged = (0, 0)
        return found


def simulate_within(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: Optimizer,
    rule: Rule | str,
    minibatches: Iterable[Batch],
    workers: int,
    held_out: Callable[[dict[str, Tensor]], float],
    *,
    target: int,
    every: int,
    paired: bool = False,
    rate: Callable[[int], float] | None = None,
    largest_gradient: float | None = None,
) -> WithinResult:
    """Train a small model under `auto(within=..)`, with N workers, or with `grow=` up to N.

    Args:
        model: the start; not changed.
        loss_fn: `loss_fn(model, *batch)` gives a minibatch's loss, a scalar; it must use the model that it is given.
        optimizer: SGD, Adam or AdamW over the model's trainable parameters, fresh.
        rule: such as "auto(within='1%')".
        minibatches: one after another, each a tensor, or several; k workers take the next k of them in each step.
        workers: N.
        held_out: gives the held-out loss of the global model's parameters and buffers.
        target: the period that measured times would want.
        every: minibatches of all workers from one held-out loss to the next.
        paired: whether the period is decided by branches; else as in a run.
        rate: minibatches of all workers so far -> factor of the learning rates; None for 1.
        largest_gradient: each worker's gradient is scaled down to this norm; None leaves it.

    Raises:
        UnsupportedError: something here cannot be stacked, or the rule has no bound.
        NonFiniteError: a worker's parameters held inf or nan at an exchange.
    """
    asked = make_rule(rule, {})
    growth, bound = asked.schedule.grow, _bound_of(asked, paired)
    plain = replace(asked.settings, rate_exponent=0.0)  # `asked` has the factor of k workers
    chosen = replace(asked, schedule=replace(asked.paced, grow=None), settings=plain)
    check_rule(chosen, overlaps=False)
    check_stackable(model, optimizer)
    number = workers if growth is None else min(growth.first, workers)
    group = StackedWorkers(model, loss_fn, optimizer, chosen, number, measures=growth is not None)
    program = _Program(held_out, every, rate, largest_gradient)
    training = _Training(program, group, chosen, asked.rate_factor)
    source, settings, extra, since = iter(minibatches), [(0, *training.setting)], 0, 0
    while training.block(source):
        grows = growth is not None and training.group.number < workers
        place = Place(
            training.done, training.setting[0], max(target, chosen.paced.pace.least), training.setting[1], grows
        )
        if paired:
            training, source, lost = _branched(training, bound, place, source)
            extra += lost
        elif training.rows:
            found, training.rows = bound.look(place, training.rows), []
            training.follow(place.period if found is None else found[0])
        if growth is not None and bound.may_grow:
            group, made = training.group, training.exchanges - since
            wanted = growth.next(group.number, workers, group.effective, made, training.done)
            if wanted > group.number:
                group.grow(wanted)
                bound.among(wanted)
                since = training.exchanges
        if settings[-1][1:] != training.setting:
            settings.append((training.done, *training.setting))
    told = tuple(text for text, _ in bound.told)
    parameters, buffers = training.group.finish()
    steps, exchanges = training.steps, training.exchanges
    return WithinResult(parameters, tuple(settings), steps, exchanges, bound.spent, told, extra, buffers)


def _bound_of(rule: Rule, paired: bool) -> LossBound:
    """What decides."""
    if rule.schedule.bound is None:
        raise UnsupportedError(f"{rule.text()} has no bound; give one such as auto(within='1%')")
    if paired and rule.schedule.grow is not None:
        raise UnsupportedError(f"{rule.text()}: branches have a fixed number of workers; leave grow out")
    return LossBound(rule.schedule.bound)


def _branched(
    training: _Training, bound: LossBound, place: Place, source: Iterator[Batch]
) -> tuple[_Training, Iterator[Batch], int]:
    """(the branch that is kept, the minibatches after it, those that were lost), where one is due and data suffice."""
    wanted = bound.branch(place)
    if wanted is None or not training.rows:  # it begins where the curve has a point
        return training, source, 0
    period, share = wanted
    count = 2 * SETTLE * period * place.workers
    batches = list(islice(source, count))
    if len(batches) < count:
        return training, iter(batches), 0
    without, with_it = training.branches(period, batches)
    losses = [
        {made: math.log(loss) for made, loss, _ in one.rows if made > place.made + count // 2 and loss is not None}
        for one in (without, with_it)
    ]
    common = sorted(losses[0].keys() & losses[1].keys())
    if len(common) < LEAST_PAIRS:
        raise UnsupportedError(
            f"a branch of {count:,} minibatches has {len(common)} held-out losses in its second half, and "
            f"{LEAST_PAIRS} are needed: give every={count // (4 * LEAST_PAIRS)} or less, and a target that is the "
            "first period times 2, 4, 8, .."
        )
    before, after = ([row[made] for made in common] for row in losses)
    found = Excess.paired(before, after, CONFIDENCE)
    return with_it if bound.branched(place, period, share, found) else without, source, count
