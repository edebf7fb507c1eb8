# SPDX-License-Identifier: Apache-2.0
"""Training of a prior P(x) on samples of one side, before the pair is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import paceline
from paceline import Rule, UnsupportedError
from paceline_dual.batches import Endless, Side, side_of
from paceline_dual.protocols import Prior
from paceline_dual.rates import share_of_rate
from paceline_dual.show import Show, Silent

SHOWN_EVERY = 20  # steps


@dataclass(frozen=True)
class PriorCourse:
    """Settings of the training of a prior.

    Attributes:
        steps: of each worker.
        batch: samples of a step.
        rate: highest learning rate of Adam.
        clip: largest norm of the gradient.
        seed: of the order of samples.
    """

    steps: int = 1000
    batch: int = 64
    rate: float = 1e-3
    clip: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise UnsupportedError(f"steps and batch are at least 1, got {self.steps} and {self.batch}")
        if not self.rate > 0 or not self.clip > 0:
            raise UnsupportedError(f"rate and clip are above 0, got {self.rate} and {self.clip}")


def train_prior(
    prior: Prior,
    samples: Side,
    course: PriorCourse | None = None,
    *,
    rule: Rule | str | None = None,
    show: Show | None = None,
) -> float:
    """Raise the likelihood of samples of one side; every worker calls it with the same arguments.

    Several workers each read their part under a rule. At the end all hold the same prior, frozen and in eval mode.

    Args:
        prior: a torch module with parameters.
        samples: of its side, labelled or not.
        course: steps, rate and so on.
        rule: as `paceline.attach` takes it.
        show: displays progress.

    Returns:
        mean log P(x) of the samples of this worker's last steps, nats: of the prior as it was then, with its dropout.

    Raises:
        UnsupportedError: it has no parameters to train (a `LabelPrior` counts instead).
        DataError: there are fewer samples than workers.
    """
    course, model = course or PriorCourse(), cast(nn.Module, prior)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UnsupportedError(f"{type(prior).__name__} has no parameters that could be trained; use it as it is")
    optimizer = torch.optim.Adam(parameters, lr=course.rate)
    scores: list[float] = []
    with paceline.attach(model, optimizer, rule, seed=course.seed) as run:
        told: Show = show if show is not None and run.world.rank == 0 else Silent()
        batches = Endless(run, side_of(samples, "the prior's part", run.world.size), course.batch)
        scheduler = LambdaLR(optimizer, lambda step: share_of_rate(step / course.steps))
        model.train()
        for step in range(course.steps):
            score = prior.log_prob(batches.next(parameters[0].device)).mean()
            optimizer.zero_grad()
            (-score).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, course.clip)
            optimizer.step()
            scheduler.step()
            if step % SHOWN_EVERY == 0 or step + SHOWN_EVERY >= course.steps:
                scores.append(float(score.detach()))
                told.doing("prior", step + 1, course.steps, f"log P {scores[-1]:.4g}")
        batches.close()
    model.eval().requires_grad_(False)
    last = scores[-SHOWN_EVERY:]
    return sum(last) / len(last)
