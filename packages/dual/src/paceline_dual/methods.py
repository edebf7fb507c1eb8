# SPDX-License-Identifier: Apache-2.0
"""What unlabelled data are used for: a strategy for each method of a course."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from paceline_dual.learning import Reward, unlabelled_loss
from paceline_dual.pair import DIRECTIONS, Direction, Pair
from paceline_dual.protocols import Conditional
from paceline_dual.settings import Course


class Learned(NamedTuple):
    """The loss of an unlabelled batch.

    Attributes:
        loss: of all models that learn from the batch, mean over rows.
        rewards: mean r1, r2 and r of its samples; None under methods without rewards.
    """

    loss: Tensor
    rewards: Tensor | None


class Method(Protocol):
    """A use of unlabelled data."""

    def begin(self, pair: Pair) -> None:
        """The warm-up is over, and the pair holds the global models."""
        ...

    def learn(self, s: Tensor, direction: Direction, generator: torch.Generator | None) -> Learned:
        """The loss of a batch of source samples of a direction, [B, ...]; samples are drawn from `generator`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        ...


class _Stateless:
    """Base of methods without state."""

    def begin(self, pair: Pair) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class Dual(_Stateless):
    """Dual learning: the closed loop of both models; see :mod:`paceline_dual.learning`.

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


class IterativeBackTranslation(_Stateless):
    """Pseudo-labels of the current primal model: the dual model learns to reconstruct s from its best target.

    A greedy search finds the best target. It is dual learning without rewards, with the best target instead of samples.
    Source: Hoang, Koehn, Haffari and Cohn, WNGT 2018, who translate anew in rounds and not at every step.
    """

    def learn(self, s: Tensor, direction: Direction, generator: torch.Generator | None) -> Learned:
        """The dual model learns; the primal one learns in steps of the other direction."""
        return _from_labels_of(direction.primal, s, direction)


class BackTranslation:
    """Pseudo-labels of the primal model at the end of the warm-up.

    Source: Sennrich, Haddow and Birch, ACL 2016; what He et al. (NIPS 2016) compare dual learning with.

    Args:
        pair: whose models are copied.
    """

    def __init__(self, pair: Pair) -> None:
        self._teachers = {name: copy.deepcopy(model) for name, model in zip(DIRECTIONS, pair.models, strict=True)}

    def begin(self, pair: Pair) -> None:
        """Copy the models to the teachers."""
        for teacher, model in zip(self._teachers.values(), pair.models, strict=True):
            teacher.load_state_dict(model.state_dict())

    def learn(self, s: Tensor, direction: Direction, generator: torch.Generator | None) -> Learned:
        """The dual model learns from the teacher's target for s."""
        return _from_labels_of(cast(Conditional, self._teachers[direction.name]), s, direction)

    def state_dict(self) -> dict[str, Any]:
        """The teachers."""
        return {name: teacher.state_dict() for name, teacher in self._teachers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The teachers."""
        for name, teacher in self._teachers.items():
            teacher.load_state_dict(state[name])


def _from_labels_of(teacher: Conditional, s: Tensor, direction: Direction) -> Learned:
    with torch.no_grad():
        best = teacher.beam(s, 1)[0][:, 0]
    return Learned(-direction.dual.log_prob(s, best).mean(), None)


def method_of(course: Course, pair: Pair) -> Method | None:
    """The method of a course; None if it uses no unlabelled data."""
    if course.method == "dual":
        return Dual(course.reward, course.mix.policy)
    if course.method == "iterative_back_translation":
        return IterativeBackTranslation()
    return BackTranslation(pair) if course.method == "back_translation" else None
