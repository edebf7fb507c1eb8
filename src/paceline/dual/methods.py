# SPDX-License-Identifier: Apache-2.0
"""What unlabelled data are used for: a strategy for each method of a course."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.dual.learning import Reward, unlabelled_loss
from paceline.dual.pair import Direction
from paceline.dual.settings import Course


class Learned(NamedTuple):
    """What an unlabelled batch gave.

    Attributes:
        loss: of all models that learn from it, mean over rows.
        rewards: mean r1, r2 and r of its samples; None under methods without rewards.
    """

    loss: Tensor
    rewards: Tensor | None


class Method(Protocol):
    """A use of unlabelled data."""

    def learn(self, s: Tensor, direction: Direction, generator: torch.Generator | None) -> Learned:
        """The loss of a batch of source samples of a direction, [B, ...]; samples are drawn from `generator`."""
        ...


class Dual:
    """Dual learning: the closed loop of both models; see :mod:`paceline.dual.learning`.

    Args:
        reward: of samples.
        policy: weight of the policy gradient; the exact gradient has 1.
    """

    def __init__(self, reward: Reward, policy: float = 1.0) -> None:
        self._reward, self._policy = reward, policy

    def learn(self, s: Tensor, direction: Direction, generator: torch.Generator | None) -> Learned:
        """Both models learn."""
        found = unlabelled_loss(s, direction.primal, direction.dual, direction.prior_target, self._reward, generator)
        numbers = torch.stack([found.r1, found.r2, found.r]).detach()
        return Learned(self._policy * found.loss_primal + found.loss_dual, numbers)


class BackTranslation:
    """Pseudo-labels: the primal model's best target, and only the dual model learns to find s again in it.

    Source: Sennrich, Haddow and Birch, ACL 2016. The best target is that of a greedy search.
    """

    def learn(self, s: Tensor, direction: Direction, generator: torch.Generator | None) -> Learned:
        """The dual model learns; the primal one gets gradients of its own in steps of the other direction."""
        with torch.no_grad():
            best = direction.primal.beam(s, 1)[0][:, 0]
        return Learned(-direction.dual.log_prob(s, best).mean(), None)


def method_of(course: Course) -> Method | None:
    """What a course asks for; None where unlabelled data are left alone."""
    if course.method == "dual":
        return Dual(course.reward, course.mix.policy)
    return BackTranslation() if course.method == "back_translation" else None
