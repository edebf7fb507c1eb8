# SPDX-License-Identifier: Apache-2.0
"""Moving averages of the model that the program keeps by itself.

Updated after each step, such a copy follows this worker's own parameters. They are the other workers', too, only where
every step is exchanged: within a block and under asynchronous rules they differ, and what is saved is rank 0's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline_plugins.zero import module_discovery
from paceline_plugins.zero.models import GlobalView, first_values
from paceline_plugins.zero.reporter import Reporter


@dataclass(eq=False)
class _Copy:
    """A module of the model's shape: its first values after the last step, and how often they changed."""

    values: Tensor
    steps: int = 0
    changes: int = 0


class Averages:
    """Modules of the trained model's shape that the program evaluates or saves, and that change at each step.

    Args:
        reporter: prints messages.
        where: gives the current line of the program.
    """

    def __init__(self, reporter: Reporter, where: Callable[[], str]) -> None:
        self._reporter, self._where = reporter, where
        self._copies: weakref.WeakKeyDictionary[nn.Module, _Copy | None] = weakref.WeakKeyDictionary()
        self._steps = 0

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self._steps += 1
        for module, one in self._copies.items():
            if one is not None:
                values = first_values(next(module.parameters()))
                one.steps += 1
                one.changes += not torch.equal(values, one.values)
                one.values = values

    def used(self, view: GlobalView, module: nn.Module) -> None:
        """The program evaluates or saves a module that is no part of the trained model."""
        run = view.run
        if not self._steps or run.world.size == 1 or run._context.progress.lockstep:
            return
        if module not in self._copies:
            is_copy = module_discovery.is_copy(module, view.roots)
            self._copies[module] = _Copy(first_values(next(module.parameters()))) if is_copy else None
            if not is_copy or next(module.parameters())._version < self._steps:
                return
        one = self._copies[module]
        if one is None or 2 * one.changes < one.steps:
            return
        self._reporter.once(
            "average",
            f"{self._where()}: {module_discovery.name(module)} is a moving average of the model that the program makes "
            f"after each step: under {run.rule.name} it is one of this worker's own parameters, not of the global "
            "model; take the average that a rule makes (ema=0.99 in its call), or --rule sync",
        )
