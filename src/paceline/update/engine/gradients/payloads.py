# SPDX-License-Identifier: Apache-2.0
"""Payload readers: which tensor of each parameter is exchanged before a step, and where the workers' mean goes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from paceline.core.flat import local
from paceline.core.optimizer_state import ensure_state
from paceline.rules.outer.frozen_adam import frozen_step


class PayloadReader(Protocol):
    """Reads the payload of a step, and names the memory for its mean."""

    def read(self, parameter: Tensor) -> Tensor | None:
        """This worker's contribution, of the parameter's shape, or None."""

    def target(self, parameter: Tensor) -> Tensor:
        """The memory for the mean, created if it does not exist."""

    def completed(self, parameter: Tensor, mean: Tensor, missing: float) -> Tensor:
        """The mean, if the share `missing` of the workers had no gradient and sent zeros."""


class GradientReader:
    """The gradient, replaced by the mean."""

    def read(self, parameter: Tensor) -> Tensor | None:
        return parameter.grad

    def target(self, parameter: Tensor) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        return local(parameter.grad)

    def completed(self, parameter: Tensor, mean: Tensor, missing: float) -> Tensor:
        """An absent gradient counts as zero."""
        return mean


class FirstMomentReader:
    """Adam's first moment; the optimizer's own step is taken in its place, with the second moment frozen.

    Args:
        optimizer: Adam or AdamW.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        return next(g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"]))

    @torch.no_grad()
    def read(self, parameter: Tensor) -> Tensor | None:
        """b1 m + (1 - b1) g."""
        return None if parameter.grad is None else self._moment(parameter, parameter.grad)

    def _moment(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The common first moment, updated with this gradient."""
        ensure_state(self._optimizer, parameter)
        group = self._group(parameter)
        gradient = -gradient if group.get("maximize") else gradient
        if group["weight_decay"] and not self._decoupled(group):
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        return torch.lerp(self._optimizer.state[parameter]["exp_avg"], gradient, 1 - float(group["betas"][0]))

    def _decoupled(self, group: dict[str, Any]) -> bool:
        return isinstance(self._optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))

    def target(self, parameter: Tensor) -> Tensor:
        ensure_state(self._optimizer, parameter)
        return local(self._optimizer.state[parameter]["exp_avg"])

    @torch.no_grad()
    def completed(self, parameter: Tensor, mean: Tensor, missing: float) -> Tensor:
        """A worker without a gradient contributes the common moment, aged by a step."""
        return torch.add(mean, local(self._moment(parameter, torch.zeros_like(parameter))), alpha=missing)

    def step(self, present: list[Tensor], since: int) -> None:
        """Make the step of the parameters that have a moment, and hide their gradients from the optimizer.

        Args:
            present: the parameters.
            since: steps since the second moment was frozen, this one included.
        """
        for parameter in present:
            group, state = self._group(parameter), self._optimizer.state[parameter]
            frozen_at = float(state["step"])
            frozen_step(
                parameter,
                state["exp_avg"],
                state["exp_avg_sq"],
                group,
                decay=float(group["weight_decay"]) if self._decoupled(group) else 0.0,
                step=int(frozen_at) + since,
                frozen_at=max(frozen_at, 1.0),
            )
        self._hidden = [(p, p.grad) for p in present if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def show(self) -> None:
        """Restore the gradients, after the optimizer's step."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
