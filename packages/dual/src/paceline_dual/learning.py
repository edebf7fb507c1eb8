# SPDX-License-Identifier: Apache-2.0
"""Dual learning from unlabelled data: a primal and an opposite model teach each other in a closed loop.

For each s of one side (He, Xia, Qin, Wang, Yu, Liu and Ma, Dual Learning for Machine Translation, NIPS 2016)::

    y_k ~ P(. | s; primal)                      k = 1 ... K
    r1_k = log P(y_k)                           by a prior that stays as it is: does y_k look like its side?
    r2_k = log P(s | y_k; dual)                 can s be found again in y_k?
    r_k  = alpha r1_k + (1 - alpha) r2_k

and J = E[r] is raised by gradient ascent in both models::

    dJ/d primal = E[ (r_k - b_k) d log P(y_k | s; primal) ]     policy gradient, b_k a baseline
    dJ/d dual   = (1 - alpha) E[ d log P(s | y_k; dual) ]       direct: NOT multiplied by r_k

The dual model's parameters stand in r itself and not in the distribution that is sampled from, so its gradient is exact
for the samples at hand; multiplying it by r_k, as some notes do, is the gradient of something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from paceline import MismatchError, UnsupportedError
from paceline_dual.amounts import tokens, within_reach
from paceline_dual.protocols import Conditional, Prior, flat, repeat

BASELINES = ("leave_one_out", "other_rows", "none")
SEARCHES = ("sample", "beam")


@dataclass(frozen=True)
class Reward:
    """The reward of a sample, and how samples are drawn.

    Attributes:
        alpha: weight of the prior's r1; that of the reconstruction r2 is 1 - alpha. The paper has 0.005 for
            translation.
        samples: K, of each s. The paper has 2.
        baseline: subtracted from a reward before it weights the policy gradient. Neither kind changes the expected
            gradient, since b_k does not depend on y_k; both lower its variance, without which rewards of -50 would be
            useless. "leave_one_out": the mean of the other K - 1 samples of the same s (K at least 2).
            "other_rows": the mean over the samples of the other rows of the batch, the only choice for K = 1; a batch
            of one row has none. "none".
        per_token: whether r1 and r2 are divided by the number of tokens (with the end symbol) of y_k and of s. Off, as
            published: log-probabilities are sums, and short y_k have better ones. On, J is made of the divided rewards
            and both gradients are those of this J.
        search: "sample" draws y_k as the equations say. "beam" takes the K best of a beam search instead, all with
            weight 1/K, as published code did. Its samples are better and always distinct, and its gradient is biased:
            it is not the gradient of J, whatever the baseline.
    """

    alpha: float = 0.005
    samples: int = 2
    baseline: str = "leave_one_out"
    per_token: bool = False
    search: str = "sample"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UnsupportedError(f"alpha is a share between 0 and 1, got {self.alpha}")
        _among("baseline", self.baseline, BASELINES)
        _among("search", self.search, SEARCHES)
        least = 2 if self.baseline == "leave_one_out" else 1
        if self.samples < least:
            raise UnsupportedError(
                f"samples is at least {least} with the baseline {self.baseline}, got {self.samples}; give more, or "
                "other_rows or none as the baseline"
            )


class Unlabelled(NamedTuple):
    """What a batch of one side gave; B rows, K samples of each.

    Attributes:
        loss_primal: its gradient is an estimate of -dJ/d primal, mean over rows; its value means nothing.
        loss_dual: -(1 - alpha) times the mean of r2; its gradient is an estimate of -dJ/d dual.
        r1: mean of the prior's log-probabilities, a number without gradient.
        r2: mean of the reconstruction's, likewise.
        r: mean reward, likewise: an estimate of J.
        samples: [B, K, ...].
        rewards: r of each sample, [B, K]; nan where a beam had fewer than K.
    """

    loss_primal: Tensor
    loss_dual: Tensor
    r1: Tensor
    r2: Tensor
    r: Tensor
    samples: Tensor
    rewards: Tensor


def unlabelled_loss(
    s: Tensor,
    primal: Conditional,
    dual: Conditional,
    prior: Prior,
    settings: Reward,
    generator: Generator | None = None,
) -> Unlabelled:
    """The two losses of one batch without labels; with all roles swapped, those of the other side's batch.

    Each model is run once with gradient, over B * K rows; the prior without. Samples are drawn with dropout off and
    scored with it as the models' modes have it, in which case the policy gradient is that of a model a little off.

    Samples that occur twice count twice, since that is how often they are drawn; only a beam can have fewer than K
    candidates, and then each row is the mean over those that it has (one alone has nothing to be compared with: under
    "leave_one_out" it leaves the primal model as it is). An empty sample is a sequence that holds its end symbol only.
    A sample that reached the model's longest length ends there; it is scored like any other, and whatever it lacks
    shows in r2. The estimate is without bias if `primal.sample` draws from just the distribution that
    `primal.log_prob` gives, ends at the longest length included.

    Args:
        s: [B, ...], one side's batch.
        primal: P(y | s), which samples and is taught by the rewards.
        dual: P(s | y), which finds s again and learns from the samples.
        prior: P(y). Its parameters get no gradient.
        settings: of the reward.
        generator: of the samples; None for torch's own.

    Raises:
        MismatchError: the batch has no rows, or a model returns another number of samples or rewards.
        UnsupportedError: a sample or s has probability 0 in the model that scores it.
    """
    if not len(s):
        raise MismatchError("a batch without rows has no loss; leave it out")
    samples, present = _found(s, primal, settings, generator)
    y, again = flat(samples), repeat(s, settings.samples)
    with torch.no_grad():
        r1 = _scored("log P(y) by the prior", prior.log_prob(y), present, y, settings)
    r2 = _scored("log P(s | y) by the dual model", dual.log_prob(again, y), present, again, settings)
    chance = _scored("log P(y | s) by the primal model", primal.log_prob(y, again), present, None, settings)
    reward = settings.alpha * r1 + (1 - settings.alpha) * r2.detach()
    share = present / present.sum(1, keepdim=True) / len(s)  # [B, K], adds up to 1
    return Unlabelled(
        loss_primal=-(share * advantages(reward, present, settings.baseline) * chance).sum(),
        loss_dual=-(1 - settings.alpha) * (share * r2).sum(),
        r1=(share * r1).sum(),
        r2=(share * r2.detach()).sum(),
        r=(share * reward).sum(),
        samples=samples,
        rewards=reward.masked_fill(~present, torch.nan),
    )


def advantages(reward: Tensor, present: Tensor, baseline: str) -> Tensor:
    """r_k - b_k, [B, K]; 0 where no sample is present.

    Args:
        reward: [B, K], without gradient, 0 where no sample is present.
        present: bool [B, K].
        baseline: one of BASELINES, see `Reward`.
    """
    total, count = reward.sum(1, keepdim=True), present.sum(1, keepdim=True)
    if baseline == "leave_one_out":
        others = (total - reward) / (count - 1).clamp(min=1)
        return (reward - others) * (present & (count > 1))
    if baseline == "other_rows":
        return (reward - (total.sum() - total) / (count.sum() - count).clamp(min=1)) * present
    return reward


def _found(s: Tensor, primal: Conditional, settings: Reward, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """K samples or candidates of each row [B, K, ...], and a mask of those that exist, bool [B, K]."""
    asked = (len(s), settings.samples)
    with torch.no_grad():
        if settings.search == "beam":
            samples, found = primal.beam(s, settings.samples)
            present = found != -torch.inf
            present[:, 0] = True  # if even the best one is impossible, the check of its log P raises
        else:
            samples = primal.sample(s, settings.samples, generator=generator)
            present = torch.ones(asked, dtype=torch.bool, device=s.device)
    if samples.shape[:2] != asked or present.shape != asked:
        raise MismatchError(
            f"{asked[1]} samples of each of {asked[0]} rows were asked for; the model returned {list(samples.shape)}: "
            "sample and beam return [B, k, ...]"
        )
    return samples, present


def _scored(name: str, log_prob: Tensor, present: Tensor, of: Tensor | None, settings: Reward) -> Tensor:
    """[B, K]: 0 where no sample is present; divided by the number of scored tokens if the settings ask for it."""
    if log_prob.shape != (present.numel(),):
        raise MismatchError(
            f"{name} has to be one number for each of {present.numel()} rows, got the shape {list(log_prob.shape)}"
        )
    if of is not None and settings.per_token:
        log_prob = log_prob / tokens(of)
    log_prob = log_prob.view(present.shape).masked_fill(~present, 0)
    within_reach(name, log_prob.detach())
    return log_prob


def _among(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnsupportedError(f"{name} is one of {', '.join(known)}; got {value!r}")
