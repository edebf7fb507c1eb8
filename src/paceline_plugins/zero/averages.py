# SPDX-License-Identifier: Apache-2.0
"""Moving averages of the model that the program keeps by itself.

Updated after each step, such a copy follows this worker's own parameters. They are the other workers', too, only where
every step is exchanged: within a block and under asynchronous rules they differ, and what is saved is rank 0's.

    e <- e + (1 - d) (x - e)            the program's update of the copy e of x, once a step
    e <- e + (1 - d^(N-1)) (x - e)      ours, after each step that follows such an update

A step of N workers is worth N minibatches, and the program makes one update in it. Both together forget as N updates
do: 1 - d is found from what the program has changed. Source: d^N, Busbridge et al., arXiv 2307.13813.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.flat import local
from paceline.update.monitor import is_sampled
from paceline_plugins.zero import module_discovery
from paceline_plugins.zero.models import GlobalView, first_values
from paceline_plugins.zero.reporter import Reporter

LOOKS = 3
"""After how many steps a copy is judged; each look waits for the device."""


SAMPLE = 4096
"""Elements of the largest tensor, from which 1 - d is found."""
ALIKE, STEADY = 0.9, 0.002
"""Least squared cosine of the change and the distance to x, and how much 1 - d may change between two updates: an equal
mean of the models after each epoch, as many as with one worker, has another one each time."""


class Follower:
    """A copy's tensors beside those that it may follow, in the same order."""

    def __init__(self, own: Iterable[Tensor], kept: Iterable[Tensor]) -> None:
        self._pairs = list(zip(own, kept, strict=True))
        self._largest = max(self._pairs, key=lambda pair: (pair[0].requires_grad, pair[0].numel()))
        self._before = self._sample()
        self._share = torch.tensor(math.nan)
        self.decay: float | None = None  # d, once it is known that there is one

    def _sample(self) -> list[Tensor]:
        return [local(one).reshape(-1)[:SAMPLE].float().clone() for one in self._largest]

    @torch.no_grad()
    def follow(self, workers: int, look: bool) -> None:
        """A step was made; `look`: it may wait for the device."""
        (own, kept), now = self._before, self._sample()
        moved, apart = now[1] - kept, own.to(kept.device) - kept
        along = moved @ apart
        share = along / (apart @ apart)
        holds = (along**2 > ALIKE * (moved @ moved) * (apart @ apart)) & (share < 0.5)
        holds &= (share - self._share).abs() <= STEADY * share
        self._share = torch.where(moved.any(), share, self._share)
        if look and self.decay is None and holds:
            self.decay = 1 - float(share)
        if self.decay is not None:
            weight = torch.where(holds, 1 - (1 - share) ** (workers - 1), 0.0)
            for mine, one in self._pairs:
                local(one).lerp_(local(mine).to(local(one)), weight.to(local(one)))
            now = self._sample()
        self._before = now


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
        self._followers: weakref.WeakKeyDictionary[nn.Module, list[Follower]] = weakref.WeakKeyDictionary()
        self._steps = 0

    def stepped(self, view: GlobalView) -> None:
        """An optimizer has stepped."""
        self._steps += 1
        workers = view.run.world.size
        if self._steps.bit_count() == 1:  # a program may begin to average later
            for root, copy in module_discovery.copies(view.roots):
                if copy not in self._followers:
                    self._followers[copy] = [Follower(*some) for some in _tensors(root, copy)]
        for copy, followers in self._followers.items():
            for follower in followers:
                follower.follow(workers, is_sampled(self._steps))
            if (decay := followers[0].decay) is not None:
                self._reporter.once(
                    "decay",
                    f"{module_discovery.name(copy)} is a moving average of the model: a step of {workers} workers "
                    f"counts as {workers} updates, so its decay {decay:.4g} becomes {decay**workers:.4g}",
                )
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


def _tensors(root: nn.Module, copy: nn.Module) -> list[tuple[list[Tensor], list[Tensor]]]:
    """The parameters of both, and their averaged buffers."""
    parameters: tuple[list[Tensor], list[Tensor]] = [*root.parameters()], [*copy.parameters()]
    own, kept = ([one for one in module.buffers() if one.is_floating_point()] for module in (root, copy))
    return [parameters, (own, kept)] if own and len(own) == len(kept) else [parameters]
