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

LOOKS = 3
"""After how many steps a copy is judged; each look waits for the device."""


@dataclass(eq=False)
class _Copy:
    """A module of the model's shape: its first values after the last look, and after how many steps they differed."""

    values: Tensor
    averaged: bool  # whether it changes at each step
    looks: int = 0
    changes: int = 0

    def look(self, values: Tensor) -> None:
        """A step was made."""
        self.looks += 1
        self.changes += not torch.equal(values, self.values)
        self.values, self.averaged = values, self.averaged or 2 * self.changes > LOOKS


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
            if one is not None and not one.averaged and one.looks < LOOKS:
                one.look(first_values(next(module.parameters())))

    def used(self, view: GlobalView, module: nn.Module) -> None:
        """The program evaluates or saves a module that is no part of the trained model."""
        run = view.run
        if not self._steps or run.world.size == 1 or run._context.progress.lockstep:
            return
        if module not in self._copies:
            self._copies[module] = None
            if module_discovery.is_copy(module, view.roots):
                first = next(module.parameters())
                writes = max(self._steps, 2 * LOOKS)  # its initial values and a load take a few
                self._copies[module] = _Copy(first_values(first), first._version >= writes)
        one = self._copies[module]
        if one is None or not one.averaged:
            return
        self._reporter.once(
            "average",
            f"{self._where()}: {module_discovery.name(module)} is a moving average of the model that the program makes "
            f"after each step: under {run.rule.name} it is one of this worker's own parameters, not of the global "
            "model; take the average that a rule makes (ema=0.99 in its call), or --rule sync",
        )
