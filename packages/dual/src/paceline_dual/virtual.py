# SPDX-License-Identifier: Apache-2.0
"""A virtual dual task: for a task without an opposite, an auxiliary model is trained with it and then discarded.

A classifier P(y|x) has no useful opposite. An auxiliary model P(x|y), however crude, still tells which label an
unlabelled x is likely to have: such an x goes through the closed loop of :mod:`paceline_dual.learning`, in which labels
are sampled and rewarded by how well x is reconstructed from them. A step's loss is::

    -log P(y|x; primal) - log P(x|y; auxiliary)        mean over the labelled rows
    + share (loss_primal + loss_dual)                  of the rows without labels

Only this direction learns from unlabelled data: the opposite one would begin with the auxiliary model's samples, which
are as crude as that model.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

from torch import Generator, Tensor, nn

from paceline import UnsupportedError
from paceline_dual.amounts import same_rows
from paceline_dual.learning import Reward, Unlabelled, unlabelled_loss
from paceline_dual.protocols import Conditional, Prior


class Step(NamedTuple):
    """The losses of one step.

    Attributes:
        loss: of both models, to be minimised.
        primal: -log P(y|x; primal), mean over the labelled rows, without gradient.
        auxiliary: -log P(x|y; auxiliary), likewise.
        unlabelled: of the rows without labels; None in the warm-up.
    """

    loss: Tensor
    primal: Tensor
    auxiliary: Tensor
    unlabelled: Unlabelled | None


class VirtualPair(nn.Module):
    """A primal model and an auxiliary one, trained together.

    Attach it and its optimizer with `paceline.attach`, and the workers exchange both models; `alone` returns the primal
    model. The prior is not one of its parameters and is neither trained nor saved.

    Args:
        primal: P(y | x), the model of interest; an `nn.Module`.
        auxiliary: P(x | y); an `nn.Module`.
        prior: P(y), not trained.
        reward: of the rows without labels. By default alpha is 0.5: of labels, unlike of sentences, log P(y) and
            log P(x|y) add up to log P(x, y), and half of that is the reward.
        share: weight of the rows without labels; the labelled ones have 1.

    Raises:
        UnsupportedError: a model is no `nn.Module`, both are the same one, or the share is negative.
    """

    def __init__(
        self,
        primal: Conditional,
        auxiliary: Conditional,
        prior: Prior,
        reward: Reward | None = None,
        share: float = 1.0,
    ) -> None:
        super().__init__()
        for name, model in (("primal", primal), ("auxiliary", auxiliary)):
            if not isinstance(model, nn.Module):
                raise UnsupportedError(
                    f"the {name} model is trained and has to be an nn.Module, got {type(model).__name__}"
                )
        if primal is auxiliary:
            raise UnsupportedError("the primal and the auxiliary model are one object; make a model for each direction")
        if not (share >= 0 and math.isfinite(share)):
            raise UnsupportedError(f"share is a weight, finite and at least 0, got {share}")
        self.primal, self.auxiliary = cast(nn.Module, primal), cast(nn.Module, auxiliary)
        self.reward, self.share = Reward(alpha=0.5) if reward is None else reward, share
        # `parameters` and `state_dict` do not find a module in a tuple: the prior is neither trained nor exchanged.
        self._prior = (prior,)

    def forward(self, x: Tensor, y: Tensor, u: Tensor | None = None, generator: Generator | None = None) -> Step:
        """The loss of one step.

        Args:
            x: [B, ...], labelled rows.
            y: [B, ...], their labels.
            u: [U, ...], rows without labels; None in the warm-up: the rewards of an untrained auxiliary model would
                mislead the primal one.
            generator: of the samples.

        Raises:
            MismatchError: x and y are not the same number of rows, or u has none.
            UnsupportedError: see `unlabelled_loss`.
        """
        same_rows(x, y)
        primal, auxiliary = cast(Conditional, self.primal), cast(Conditional, self.auxiliary)
        found, lost = -primal.log_prob(y, x).mean(), -auxiliary.log_prob(x, y).mean()
        if u is None:
            return Step(found + lost, found.detach(), lost.detach(), None)
        made = unlabelled_loss(u, primal, auxiliary, self._prior[0], self.reward, generator)
        loss = found + lost + self.share * (made.loss_primal + made.loss_dual)
        return Step(loss, found.detach(), lost.detach(), made)

    def alone(self) -> nn.Module:
        """The primal model in eval mode."""
        return self.primal.eval()
