# SPDX-License-Identifier: Apache-2.0
"""What `time_to_quality.py` tries that the package does not have, as a result says whether it should.

    period     "longer" and "shorter": 2, 4 or 8 minibatches, by the share e = E / k that k workers are worth. A block
               has 8 while e < 0.5, 4 while e < 0.75, then 2; "shorter" begins with 2 and ends with 8
    tensors    amplification by each tensor's own diversity; embeddings are left as they are (arXiv 2604.21428)

The number of workers grows as under `simulate_grown`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from _quality_newbob import Control
from _quality_tasks import Batch, Task
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.rules.outer.base import Coefficients
from paceline.rules.outer.diversity import ratio, smoothed
from paceline.rules.rule import Rule
from paceline.rules.schedule import Growth
from paceline_plugins.forecast.vectorised.grown import stack
from paceline_plugins.forecast.vectorised.vectorised import StackedWorkers
from paceline_plugins.forecast.vectorised.vectorised_blocks import StackedBlocks

LAWS = {1: (2, 4, 8), 2: (8, 4, 2)}
"""Periods by the share, from the least; 1 is "shorter" while workers say the same, 2 "longer"."""
BOUNDS = (0.5, 0.75)


def period_of(law: int, share: float) -> int:
    """Of the next block.

    >>> period_of(1, 0.4), period_of(1, 0.6), period_of(2, 0.9)
    (2, 4, 2)
    """
    return LAWS[law][sum(share >= bound for bound in BOUNDS)]


class _EachTensor(StackedBlocks):
    """Blocks in which each tensor has a diversity of its own; those at the places of `plain` have none."""

    plain: frozenset[int] = frozenset()
    _each: list[float | None]
    _now: dict[int, float]

    def _measure(self, c: Coefficients) -> None:
        super()._measure(c)
        parts = list(self._parts.values())
        before = getattr(self, "_each", [None] * len(parts))
        self._now = {id(part): one or 1.0 for part, one in zip(parts, before, strict=True)}
        self._each = [None if place in self.plain else self._of(place, c, before) for place in range(len(parts))]

    def _of(self, place: int, c: Coefficients, before: list[float | None]) -> float:
        part = list(self._parts.values())[place]
        moved = part.stacked - self._rule.merging.origin(part.anchor, part.state, c, torch.empty_like(part.anchor))
        norms, norm_of_mean = moved.flatten(1).norm(dim=1), moved.mean(0).norm()
        return smoothed(before[place], ratio(float(norms.mean()), float(norm_of_mean), self._workers))

    def _merge(self, part: Any, sent: Any) -> None:
        super()._merge(part, replace(sent, c=replace(sent.c, diversity=self._now[id(part)])))


class _Workers(StackedWorkers):
    """Workers with such blocks."""

    def by_tensors(self, model: nn.Module, rule: Rule, optimizer: Optimizer) -> None:
        """Give each tensor its own diversity."""
        inside = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
        buffers = self._model.buffers, self._model.of_worker_0
        blocks = _EachTensor(rule, optimizer, self._optimizer, *buffers, self.number, measures=True)
        blocks.plain = frozenset(place for place, p in enumerate(model.parameters()) if id(p) in inside)
        self._blocks = blocks


def train_trial(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    rule: Rule,
    batches: Iterator[Batch],
    workers: int,
    growth: Growth,
    rate: Callable[[int, int], float],
    *,
    law: int = 0,
    tensors: bool = False,
    control: Control | None = None,
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Train; the global model, and rows of workers, minibatches of all, what they were worth, and the period."""
    rule = replace(rule, settings=replace(rule.settings, rate_exponent=0.0))
    group = _Workers(model, task.loss, optimizer, rule, growth.first, measures=True)
    if tensors:
        group.by_tensors(model, rule, optimizer)
    made: dict[tuple[int, int], list[float]] = {}
    period, done, blocks = rule.blocks.period, 0, 0
    while len(step := list(islice(batches, group.number))) == group.number:
        group.step(stack(step), rate(done, group.number), task.largest_gradient)
        done += group.number
        row = made.setdefault((group.number, period), [group.number, 0, 1.0, period])
        row[1:3] = [row[1] + group.number, round(group.effective, 2)]
        if group.in_block:
            continue
        blocks += 1
        if control is not None and control.due(done):
            control.look(group.global_model())
            if control.over:
                break
        wanted = growth.next(group.number, workers, group.effective, blocks)
        if wanted > group.number:
            group.grow(wanted)
            blocks = 0
        if law:
            period = period_of(law, group.effective / group.number)
            rule = replace(rule, schedule=replace(rule.blocks, period=period))
            group.retune(rule)
    return group.finish()[0], list(made.values())
