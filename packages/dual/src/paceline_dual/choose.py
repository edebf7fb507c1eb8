# SPDX-License-Identifier: Apache-2.0
"""Candidates with both models' scores, their ranking at a weight, and the choice of the weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline import DataError, UnsupportedError
from paceline_dual.sequences import same_width

GRID = tuple(step / 20 for step in range(21))
"""Weights to try: 0, 0.05 ... 1."""

Measure = Callable[[Tensor, Tensor], float]
"""From answers and references, both [N, ...] with a row for each pair, to a number; more is better."""


class Ranking(NamedTuple):
    """Candidates of B rows, best first.

    Attributes:
        y: [B, k, ...].
        scores: [B, k]; -inf where a beam had fewer, whose candidates are padding.
    """

    y: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Candidates:
    """The primal model's beam for B rows, with the parts of each score.

    Attributes:
        y: [B, k, ...], in the primal model's order.
        primal: log P(y|x), [B, k]; -inf where a beam had fewer.
        opposite: log P(x|y) + log P(y), [B, k]: log P(x) + log P(y|x) according to the opposite model.
    """

    y: Tensor
    primal: Tensor
    opposite: Tensor

    def ranking(self, weight: float) -> Ranking:
        """Ordered by weight * primal + (1 - weight) * opposite; ties stay in the primal model's order."""
        scores = mixed(weight, self.primal, self.opposite).masked_fill(self.primal == -torch.inf, -torch.inf)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return Ranking(self.y[torch.arange(len(order), device=order.device)[:, None], order], scores)

    def best(self, weight: float) -> Tensor:
        """The first of `ranking`, [B, ...]."""
        return self.ranking(weight).y[:, 0]


def mixed(weight: float, mine: Tensor, other: Tensor) -> Tensor:
    """weight * mine + (1 - weight) * other; a term of weight 0 is ignored, even if it is -inf."""
    if weight in (0, 1):
        return mine if weight else other
    return weight * mine + (1 - weight) * other


@dataclass(frozen=True)
class Choice:
    """The outcome of a search for the weight.

    Attributes:
        weight: the best one.
        value: of the measure at this weight.
        tried: (weight, value) of all weights, in the grid's order.
    """

    weight: float
    value: float
    tried: tuple[tuple[float, float], ...]


def choose(heldout: Sequence[tuple[Candidates, Tensor]], measure: Measure, grid: Sequence[float] = GRID) -> Choice:
    """The weight of the grid whose best candidates score best over all held-out rows.

    The largest weight wins a tie: it changes the primal model's answers least.

    Args:
        heldout: candidates of each batch, and the right answers [B, ...].
        measure: called once for each weight, with the answers of all batches together.
        grid: weights in [0, 1].

    Raises:
        DataError: there are no held-out rows.
        UnsupportedError: the grid is empty or leaves [0, 1], or a measure is nan.
    """
    if not sum(len(right) for _, right in heldout):
        raise DataError("the weight is chosen on held-out pairs and there are none; give some")
    if not grid:
        raise UnsupportedError("the grid of weights is empty; give numbers between 0 and 1")
    right = joined([right for _, right in heldout])
    tried = []
    for weight in grid:
        check_weight(weight)
        value = float(measure(joined([candidates.best(weight) for candidates, _ in heldout]), right))
        if math.isnan(value):
            raise UnsupportedError(f"the measure is nan at the weight {weight}; it has to be a number, more is better")
        tried.append((weight, value))
    weight, value = max(tried, key=lambda one: (one[1], one[0]))
    return Choice(weight, value, tuple(tried))


def exact_match(found: Tensor, right: Tensor) -> float:
    """Share of rows that are right in every token; of labels, the accuracy."""
    found, right = same_width([found, right]) if found.dim() == 2 else (found, right)
    return float(
        (found == right).flatten(1).all(1).double().mean() if found.dim() > 1 else (found == right).double().mean()
    )


def check_weight(weight: float) -> None:
    """Raise UnsupportedError unless a weight is a share."""
    if not 0 <= weight <= 1:
        raise UnsupportedError(f"the weight of the primal model is a share between 0 and 1, got {weight}")


def joined(batches: Sequence[Tensor]) -> Tensor:
    """Batches of rows as one; sequences are padded to one width."""
    batches = list(batches)
    if batches[0].dim() == 2 and not batches[0].is_floating_point():
        batches = list(same_width(batches))
    return torch.cat(batches)
