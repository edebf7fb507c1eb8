# SPDX-License-Identifier: Apache-2.0
"""What all rows have in common, and the loop that all of them are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class Setting:
    """Sizes.

    Attributes:
        parameters: of the model, fp32.
        layers: equal ones.
        compute_ms: of the emulated accelerator for a step.
        period: steps of a block.
        fragments: of the model, for the streaming rows.
        rate_mbit: of each host's link, each direction.
        steps: measured, of rows that exchange at every step.
        blocks: measured, of the others.
    """

    parameters: int
    layers: int
    compute_ms: float
    period: int
    fragments: int
    rate_mbit: float
    steps: int
    blocks: int

    @property
    def fragment_overlap(self) -> int:
        """Steps for which a fragment may be on its way, with torchft and paceline: one less than between fragments."""
        return self.period // self.fragments - 1


@dataclass
class Trainer:
    """A step, and the exchanges made so far where steps do not tell (None: one every step, or every block)."""

    step: Callable[[], None]
    exchanges: Callable[[], float] | None = None
    held: Any = None


def outer(model: nn.Module) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer."""
    return torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
