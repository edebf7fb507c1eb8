# SPDX-License-Identifier: Apache-2.0
"""Dual supervised learning: with labels, two opposite models are held to P(x) P(y|x) = P(y) P(x|y).

Xia, Qin, Chen, Bian, Yu and Liu, Dual Supervised Learning, ICML 2017::

    gap(x, y) = log P(x) + log P(y|x; forward) - log P(y) - log P(x|y; backward)
    loss_forward  = mean[ -log P(y|x; forward)  + lambda_forward  gap^2 ]
    loss_backward = mean[ -log P(x|y; backward) + lambda_backward gap^2 ]

Log-probabilities are sums over tokens with the end symbol, never means. In each gap the opposite model and the priors
are constants: every model is pulled towards the other, with a weight of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline import MismatchError, UnsupportedError
from paceline_dual.amounts import same_rows, tokens, within_reach
from paceline_dual.protocols import Conditional, Prior

SIDES = ("x", "y")

Weight = float | Tensor | Callable[[Tensor, Tensor], Tensor]
"""Of gap^2: a number, a number for each row [B], or a function of (x, y) that returns such a tensor: `ByLength`."""


class Opposites(Protocol):
    """Two opposite models and the priors of both sides; `paceline_dual.Pair` is one."""

    @property
    def forward_model(self) -> Conditional:
        """P(y | x)."""

    @property
    def backward_model(self) -> Conditional:
        """P(x | y)."""

    @property
    def prior_x(self) -> Prior:
        """P(x), which stays as it is."""

    @property
    def prior_y(self) -> Prior:
        """P(y), which stays as it is."""


@dataclass(frozen=True)
class ByLength:
    """A weight that falls with what a row holds: (scale / tokens)^2, so that gap^2 counts per token.

    The paper has (5 / length)^2 and (0.5 / length)^2 for sentiment and (30 / 3072)^2 for images of 3072 numbers.

    Attributes:
        scale: the number above the line.
        side: "x" or "y", whose tokens (with the end symbol) or features are counted.
    """

    scale: float
    side: str = "x"

    def __post_init__(self) -> None:
        _weight("scale", self.scale)
        if self.side not in SIDES:
            raise UnsupportedError(f"side is one of x, y; got {self.side!r}")

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """The weight of each row, [B]."""
        return (self.scale / tokens(x if self.side == "x" else y)) ** 2


@dataclass(frozen=True)
class Duality:
    """Weights of the constraint, and the step from which they apply.

    Attributes:
        forward: weight of gap^2 in the forward model's loss. The paper has 0.01 in both directions for translation.
        backward: the same in the backward model's.
        warm: steps of plain likelihood before it: the gap of untrained models is noise.
    """

    forward: Weight = 0.01
    backward: Weight = 0.01
    warm: int = 0

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if isinstance(getattr(self, name), (int, float)):
                _weight(name, getattr(self, name))
        if self.warm < 0:
            raise UnsupportedError(f"warm is a number of steps, at least 0, got {self.warm}")

    def at(self, step: int) -> Duality:
        """The weights at step 0, 1, 2 ...: 0 during the warm-up."""
        return replace(self, forward=0.0, backward=0.0) if step < self.warm else self

    @property
    def off(self) -> bool:
        """Whether both weights are 0, so that the gap is not needed."""
        return all(isinstance(w, (int, float)) and w == 0 for w in (self.forward, self.backward))


class Supervised(NamedTuple):
    """The losses of a batch of B pairs.

    Attributes:
        loss_forward: mean over rows; its gradient reaches the forward model only.
        loss_backward: likewise.
        forward: log P(y|x; forward) of each row [B], without gradient.
        backward: log P(x|y; backward), likewise.
        gap: [B], likewise; None if both weights are 0, since the priors were not run.
    """

    loss_forward: Tensor
    loss_backward: Tensor
    forward: Tensor
    backward: Tensor
    gap: Tensor | None


def supervised_loss(x: Tensor, y: Tensor, models: Opposites, duality: Duality | None = None) -> Supervised:
    """The two losses of a batch of labelled pairs; every model runs once.

    Args:
        x: [B, ...].
        y: [B, ...].
        models: both directions and both priors.
        duality: the weights in force, `Duality.at(step)` where there is a warm-up; None for the likelihood alone. With
            both weights 0 the losses are the plain likelihoods to the bit and the priors are not run.

    Raises:
        MismatchError: x and y are not the same number of rows, or a weight is of another shape.
        UnsupportedError: a weight is negative, or a row has probability 0 in a model or prior.
    """
    same_rows(x, y)
    duality = Duality(0.0, 0.0) if duality is None else duality
    forward, backward = models.forward_model.log_prob(y, x), models.backward_model.log_prob(x, y)
    found, lost = forward.detach(), backward.detach()
    loss_forward, loss_backward = -forward.mean(), -backward.mean()
    if duality.off:
        return Supervised(loss_forward, loss_backward, found, lost, None)
    prior = _priors(x, y, models)
    within_reach("log P(y|x) by the forward model", found)
    within_reach("log P(x|y) by the backward model", lost)
    return Supervised(
        loss_forward + (_weights("forward", duality.forward, x, y) * (prior + forward - lost) ** 2).mean(),
        loss_backward + (_weights("backward", duality.backward, x, y) * (prior + found - backward) ** 2).mean(),
        found,
        lost,
        prior + found - lost,
    )


@torch.no_grad()
def gap(x: Tensor, y: Tensor, models: Opposites) -> Tensor:
    """log P(x) + log P(y|x) - log P(y) - log P(x|y) of each row [B], without gradient: 0 where the models agree.

    Args:
        x: [B, ...].
        y: [B, ...].
        models: both directions and both priors.

    Raises:
        MismatchError: x and y are not the same number of rows.
        UnsupportedError: a row has probability 0 in a prior.
    """
    same_rows(x, y)
    return _priors(x, y, models) + models.forward_model.log_prob(y, x) - models.backward_model.log_prob(x, y)


@torch.no_grad()
def _priors(x: Tensor, y: Tensor, models: Opposites) -> Tensor:
    """log P(x) - log P(y), [B]."""
    of_x, of_y = models.prior_x.log_prob(x), models.prior_y.log_prob(y)
    within_reach("log P(x) by the prior", of_x)
    within_reach("log P(y) by the prior", of_y)
    return of_x - of_y


def _weights(name: str, weight: Weight, x: Tensor, y: Tensor) -> Tensor | float:
    """Of each row, or one of all; checked."""
    if isinstance(weight, (int, float)):
        return weight
    found = (weight if isinstance(weight, Tensor) else weight(x, y)).detach()
    if found.dim() and found.shape != (len(x),):
        raise MismatchError(
            f"the weight {name} is one number, or one for each of {len(x)} rows; got the shape {list(found.shape)}"
        )
    if not bool((found >= 0).all()):
        raise UnsupportedError(f"the weight {name} is at least 0 in every row, got {float(found.min())}")
    return found


def _weight(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise UnsupportedError(f"{name} is a weight, finite and at least 0, got {value}")
