# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a training, and its learning rate over a round."""

from __future__ import annotations

import math

import torch
from torch import nn

from paceline_lightrnn.settings import Course

WARM_UP, LOWEST = 0.02, 0.05  # of a round; of the highest rate


def make_optimizer(model: nn.Module, course: Course) -> torch.optim.Optimizer:
    """Adam or SGD, at the highest rate of the course."""
    if course.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=course.highest_rate)
    return torch.optim.Adam(model.parameters(), lr=course.highest_rate, fused=True)


def share_of_rate(done: float) -> float:
    """The learning rate as a share of the highest: up over the first 2 % of a round, then down along a cosine."""
    if done < WARM_UP:
        return (done + WARM_UP / 20) / (WARM_UP * 1.05)
    return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))
