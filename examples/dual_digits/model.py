# SPDX-License-Identifier: Apache-2.0
"""The model that is wanted, a small classifier; and the auxiliary one, which says how each digit looks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from data import CLASSES, PIXELS
from paceline_dual import Classifier

DIRECTIONS = 16  # in which a digit's pixels vary together
LEAST = 0.2  # deviation of a pixel on its own: five pictures tell little about how much it varies


def make_classifier() -> Classifier:
    """P(digit | picture)."""
    layers = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, CLASSES))
    return Classifier(layers, CLASSES)


class Look(nn.Module):
    """P(picture | digit): a normal distribution, the mean of which is the digit's own.

    How pixels vary, together in a few directions (slant, width, thickness) and each on its own, is the same for all
    digits; so every picture tells something about it, whatever its label.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.full((CLASSES, PIXELS), 0.3))
        self.together = nn.Parameter(0.05 * torch.randn(PIXELS, DIRECTIONS))
        self.alone = nn.Parameter(torch.full((PIXELS,), -1.0))  # the logarithm of what is above LEAST

    def _pictures(self, x: Tensor) -> torch.distributions.LowRankMultivariateNormal:
        variance = (self.alone.exp() + LEAST) ** 2
        return torch.distributions.LowRankMultivariateNormal(self.mean[x], self.together, variance)

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """log density [B] of pictures y [B, PIXELS], each under its digit x [B]."""
        return self._pictures(x).log_prob(y)

    @torch.no_grad()
    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        """k pictures of each digit of x [B], [B, k, PIXELS]."""
        shape = (len(x), k)
        moved = torch.randn(*shape, DIRECTIONS, generator=generator) @ self.together.T
        noise = torch.randn(*shape, PIXELS, generator=generator) * (self.alone.exp() + LEAST)
        return self.mean[x][:, None] + moved + noise

    @torch.no_grad()
    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The one picture that is most probable; a density has no second best, so the others are missing."""
        pictures, scores = torch.zeros(len(x), k, PIXELS), torch.full((len(x), k), -torch.inf)
        pictures[:, 0], scores[:, 0] = self.mean[x], self.log_prob(self.mean[x], x)
        return pictures, scores
