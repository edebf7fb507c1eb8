# SPDX-License-Identifier: Apache-2.0
"""Held-out pairs: sums that add up, right outputs, samples of sides of every kind."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from paceline_dual import evaluation
from paceline_dual.batches import pairs_of
from paceline_dual.classifier import Classifier, LabelPrior
from paceline_dual.pair import Pair
from paceline_dual.settings import Looks
from paceline_dual.supervised import gap
from tasks import LABELS, draw, labels_data, labels_pair


def test_sums_over_held_out_pairs_are_those_of_a_loop() -> None:
    pair, data = labels_pair(), labels_data()
    heldout = pairs_of(data.heldout, "held-out", 1)
    x, y = data.heldout  # type: ignore[misc]
    parts = [evaluation.look(pair, heldout, Looks(batch=4), (k, 3)) for k in range(3)]
    whole = evaluation.look(pair, heldout, Looks())
    assert torch.allclose(torch.stack(parts).sum(0), whole)
    row = evaluation.row_of(7, whole, torch.tensor([[2.0, -4, -6, -8], [0, 0, 0, 0]]))
    distance = gap(x, y, pair)
    assert row["gap"] == pytest.approx(float(distance.abs().mean()))
    assert row["gap_rms"] == pytest.approx(float((distance**2).mean().sqrt()))
    assert row["forward"] == pytest.approx(float(pair.forward_model.log_prob(y, x).detach().mean()))
    assert row["prior_x"] == pytest.approx(float(pair.prior_x.log_prob(x).mean()))
    best = pair.backward_model.distribution(y).argmax(1)  # type: ignore[attr-defined]
    assert row["exact_backward"] == pytest.approx(float((best == x).double().mean()))
    assert row["rewards"] == {"forward": {"r1": -2.0, "r2": -3.0, "r": -4.0}, "backward": None}


def test_a_side_that_is_neither_sequence_nor_label_has_no_right_outputs() -> None:
    pair = features_pair()
    x = torch.randn(6, 2)
    heldout = pairs_of((x, draw(6, 1)), "held-out", 1)
    row = evaluation.row_of(0, evaluation.look(pair, heldout, Looks()), torch.zeros(2, 4))
    assert row["exact_backward"] is None and row["exact_forward"] is not None
    found = evaluation.translations(pair, heldout, Looks(samples=9), 0.5)
    assert [one["direction"] for one in found] == ["forward"] * 6 and found[0]["source"] == "2 numbers"
    json.dumps(found)


class Gaussian(nn.Module):
    """Numbers [B, 2] around nothing, or around what a label has: a prior and a model of features."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Embedding(LABELS, 2)

    def log_prob(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mean = self.mean(y) if y is not None else torch.zeros(2)
        return torch.distributions.Normal(mean, 1.0).log_prob(x).sum(1)

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        raise AssertionError("nobody asks for it")

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("nobody asks for it")


def features_pair() -> Pair:
    """Features on one side, labels on the other."""
    return Pair(Classifier(nn.Linear(2, LABELS), LABELS), Gaussian(), Gaussian(), LabelPrior(LABELS))
