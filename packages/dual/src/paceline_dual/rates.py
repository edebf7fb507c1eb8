# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a pair, and its two learning rates over a course."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from paceline_dual.pair import DIRECTIONS, Pair
from paceline_dual.settings import Course

WARM_UP, LOWEST = 0.02, 0.05  # of a phase; of the highest rate


def make_optimizer(pair: Pair, course: Course) -> torch.optim.Optimizer:
    """One Adam with a group of parameters for each direction, forward first."""
    groups = [
        {"params": list(model.parameters()), "lr": course.loop.rates.warm, "name": name}
        for name, model in zip(DIRECTIONS, pair.models, strict=True)
    ]
    return torch.optim.Adam(groups)


def make_scheduler(optimizer: torch.optim.Optimizer, course: Course, step: Callable[[], int]) -> LambdaLR:
    """The groups' learning rates; `step` returns the current step."""

    def curve(name: str) -> Callable[[int], float]:
        return lambda _: rate(course, name, step()) / course.loop.rates.warm

    return LambdaLR(optimizer, [curve(name) for name in DIRECTIONS])


def rate(course: Course, direction: str, step: int) -> float:
    """The learning rate of a direction at a step; each phase has a highest rate and a cosine of its own."""
    highest = course.loop.rates.warm if step < course.warm else float(getattr(course.loop.rates, direction))
    return highest * share_of_rate(course.done(step))


def share_of_rate(done: float) -> float:
    """The learning rate as a share of the highest: linear up over the first 2 % of a phase, then a cosine down."""
    if done < WARM_UP:
        return (done + WARM_UP / 20) / (WARM_UP * 1.05)
    return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))
