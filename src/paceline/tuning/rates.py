# SPDX-License-Identifier: Apache-2.0
"""Factors on the learning rates that a program's own schedule sets.

A schedule may write a group's rate at every step, from its own state. So a factor is applied only during the
optimizer's step, and the rate is restored afterwards: the schedule and the program see only the schedule's rates. What
the step itself writes into the rate (an optimizer with a schedule of its own) is kept, without the factor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]


class Rates:
    """Makes the optimizers' steps with each group's rate times its factor.

    Attributes:
        factors: number of a group, counted through all optimizers -> factor; 1 if missing.
        common: a further factor of all groups, which follows from the number of workers and is no setting.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self.factors: dict[int, float] = {}
        self._common = 1.0
        self._stepping: Optimizer | None = None  # its step is under way
        self._kept: list[tuple[Group, Any, Any, float]] = []  # a group, its rate, the rate in its place, their ratio
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def groups(self) -> list[tuple[Optimizer, Group]]:
        """The groups in the order of their numbers; read each time, because loading a state replaces them."""
        return [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def common(self) -> float:
        return self._common

    @common.setter
    def common(self, factor: float) -> None:
        """In the middle of a step it holds for that step already."""
        self._common = factor
        if self._stepping is not None:
            self._put_back()
            self._apply(self._stepping)

    def factor(self, number: int) -> float:
        return self.factors.get(number, 1.0)

    def scale(self, number: int, factor: float) -> None:
        self.factors.pop(number, None)
        if factor != 1:
            self.factors[number] = factor

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._put_back(1.0)  # the last step may have raised, and the program may have written a rate since
        self._stepping = optimizer
        if self.factors or self.common != 1:
            self._apply(optimizer)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepping = None
        self._put_back()

    def _apply(self, only: Optimizer | None) -> None:
        for number, (optimizer, group) in enumerate(self.groups()):
            factor = self.common * self.factor(number)
            if factor == 1 or "lr" not in group or (only is not None and optimizer is not only):
                continue
            rate = group["lr"]
            if isinstance(rate, Tensor):  # a captured graph may hold its address
                kept = rate.clone()
                self._kept.append((group, kept, rate.mul_(factor).clone(), factor))
            else:
                group["lr"] = rate * factor
                self._kept.append((group, rate, group["lr"], factor))

    def _put_back(self, over: float | None = None) -> None:
        """Restore the rates; one that was written meanwhile stays, divided by `over`, by default its factor."""
        while self._kept:
            group, rate, applied, factor = self._kept.pop()
            now = group["lr"]
            written = now / (over or factor or 1.0)
            if isinstance(now, Tensor):  # compared where it is
                write_rate(group, torch.where(now == applied, torch.as_tensor(rate).to(now), written))
            else:
                write_rate(group, rate if now == applied else written)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, all groups show their rates times their factors."""
        self._put_back()
        self._apply(None)
        try:
            yield
        finally:
            self._put_back()

    def close(self) -> None:
        self._put_back()
        for handle in self._handles:
            handle.remove()
        self._handles = []


def write_rate(group: Group, rate: Any) -> None:
    """Write a group's rate; in place where it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(rate) if isinstance(rate, Tensor) else group["lr"].fill_(rate)
    else:
        group["lr"] = rate
