# SPDX-License-Identifier: Apache-2.0
"""Stacked workers whose number grows (:mod:`paceline.rules.schedule.growth`), as far as it is worth it.

From stage to stage the model, the local optimizers' state and the outer state go on. A worker that begins takes all of
that from one that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UnsupportedError
from paceline.rules.recipes import make_rule
from paceline.rules.rule import Rule
from paceline.rules.schedule import GivenGrowth, Growth
from paceline.rules.schedule.growth import rate_factor
from paceline_plugins.forecast.vectorised.vectorised import Batch, Loss, StackedWorkers, check_stackable
from paceline_plugins.forecast.vectorised.vectorised_blocks import check_rule


@dataclass(frozen=True)
class Stage:
    """Part of a training with one number of workers."""

    workers: int  # k
    minibatches: int  # of all k workers
    effective: float  # how many workers they were worth at the end of the stage


@dataclass(frozen=True)
class GrownResult:
    """Result of a training with a growing number of workers."""

    parameters: dict[str, Tensor]  # name -> the global model's parameter, in the model's shape and dtype
    stages: tuple[Stage, ...]  # in order
    buffers: dict[str, Tensor] = field(default_factory=dict)  # name -> the global model's buffer, likewise

    @property
    def steps(self) -> int:
        """Minibatches that were made one after another; one worker alone makes all of them so."""
        return sum(stage.minibatches // stage.workers for stage in self.stages)


def simulate_grown(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: Optimizer,
    rule: Rule | str,
    minibatches: Iterable[Batch],
    workers: int,
    *,
    growth: Growth | GivenGrowth | None = None,
    rate: Callable[[int, int], float] | None = None,
    largest_gradient: float | None = None,
) -> GrownResult:
    """Train a small model with few workers at first, and more as they come to be worth it.

    Args:
        model: the start; not changed.
        loss_fn: `loss_fn(model, *batch)` gives a minibatch's loss, a scalar; it must use the model that it is given.
        optimizer: SGD, Adam or AdamW over the model's trainable parameters, fresh.
        rule: a rule with blocks.
        minibatches: one after another, each a tensor, or several; k workers take the next k of them in each step. What
            is left in the end and is less than a step is not trained on.
        workers: N, the most workers.
        growth: how their number grows; None for the rule's own `grow`, or `Growth()` if it has none.
        rate: (minibatches of all workers so far, workers) -> factor of the learning rates; None for that of `growth`.
        largest_gradient: each worker's gradient is scaled down to this norm; None leaves it.

    Returns:
        The global model, with the last block merged however short it was, and the stages.

    Raises:
        UnsupportedError: something here cannot be stacked, or the rule exchanges no blocks.
        NonFiniteError: a worker's parameters held inf or nan at an exchange.
    """
    chosen = make_rule(rule, {})
    growing = growth or chosen.schedule.grow or Growth()
    if chosen.schedule.grow is not None:
        chosen = replace(chosen, schedule=replace(chosen.blocks, grow=None))
    chosen = replace(chosen, settings=replace(chosen.settings, rate_exponent=0.0))  # that of the growth counts
    check_rule(chosen, overlaps=False)
    check_stackable(model, optimizer)
    if not chosen.schedule.exchanges_blocks or chosen.schedule.warmup:
        raise UnsupportedError(f"{chosen.text()}: the number of workers grows under rules with blocks and no warmup")
    if workers < growing.first:
        raise UnsupportedError(f"{workers} workers are fewer than the {growing.first} of the first blocks")
    group = StackedWorkers(model, loss_fn, optimizer, chosen, growing.first, measures=True)
    source, done, stages = iter(minibatches), 0, [Stage(growing.first, 0, 1.0)]
    while len(step := list(islice(source, group.number))) == group.number:
        factor = rate_factor(group.number, growing.rate_exponent) if rate is None else rate(done, group.number)
        group.step(stack(step), factor, largest_gradient)
        done += group.number
        stages[-1] = Stage(group.number, stages[-1].minibatches + group.number, group.effective)
        made = stages[-1].minibatches // (group.number * chosen.schedule.period)
        wanted = growing.next(group.number, workers, group.effective, made, done)
        if not group.in_block and wanted > group.number:
            group.grow(wanted)
            stages.append(Stage(group.number, 0, group.effective))
    parameters, buffers = group.finish()
    return GrownResult(parameters, tuple(stages), buffers)


def stack(step: list[Batch]) -> tuple[Tensor, ...]:
    """The workers' minibatches, each tensor of shape (k, ...)."""
    rows = [(batch,) if isinstance(batch, Tensor) else tuple(batch) for batch in step]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))
