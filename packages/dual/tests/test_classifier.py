# SPDX-License-Identifier: Apache-2.0
"""Labels: values worked out by hand, exact rankings, and text that depends on its label."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import MismatchError, UnsupportedError
from paceline_dual.classifier import Classifier, LabelPrior, LabelToText
from paceline_dual.protocols import Conditional, Prior, flat, repeat
from paceline_dual.sequences import pad, same_width

TINY: dict[str, Any] = {"dimension": 16, "layers": 1, "heads": 2, "longest": 3}
# P = (1/7, 2/7, 4/7) and (1/2, 1/4, 1/4)
LOGITS = torch.tensor([[1.0, 2.0, 4.0], [2.0, 1.0, 1.0]]).log()


def given() -> Classifier:
    """A classifier whose logits are its input."""
    return Classifier(torch.nn.Identity(), 3)


def test_they_are_what_the_protocols_ask_for() -> None:
    assert isinstance(given(), Conditional) and isinstance(LabelToText(2, 2, **TINY), Conditional)
    assert isinstance(LabelPrior(2), Prior)


def test_a_classifier_says_what_the_softmax_says() -> None:
    log_probs = given().log_prob(torch.tensor([2, 1]), LOGITS)
    assert log_probs.exp().tolist() == pytest.approx([4 / 7, 1 / 4])


def test_its_gradient_is_that_of_the_softmax() -> None:
    logits = LOGITS.clone().requires_grad_()
    given().log_prob(torch.tensor([2, 0]), logits).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[-1 / 7, -2 / 7, 3 / 7], [1 / 2, -1 / 4, -1 / 4]]))


def test_its_beam_is_exact() -> None:
    labels, log_probs = given().beam(LOGITS, 3)
    assert labels[0].tolist() == [2, 1, 0] and labels[1, 0].item() == 0
    assert log_probs[0].exp().tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    with pytest.raises(MismatchError, match="at most 3; got 4"):
        given().beam(LOGITS, 4)


def test_its_samples_follow_it() -> None:
    draws = 7000
    labels = given().sample(LOGITS, draws, generator=torch.Generator().manual_seed(0))
    assert labels.shape == (2, draws)
    for row, wanted in ((0, (1 / 7, 2 / 7, 4 / 7)), (1, (1 / 2, 1 / 4, 1 / 4))):
        for label, probability in enumerate(wanted):
            seen = (labels[row] == label).double().mean().item()
            assert abs(seen - probability) < 4 * math.sqrt(probability * (1 - probability) / draws)


def test_a_classifier_is_exact_for_what_it_classifies_without_dropout() -> None:
    model = Classifier(torch.nn.Sequential(torch.nn.Dropout(0.9), torch.nn.Linear(4, 3)), 3).train()
    x = torch.randn(5, 4)
    first, second = model.beam(x, 3), model.beam(x, 3)
    assert torch.equal(first[1], second[1]) and model.training and not first[1].requires_grad


def test_priors_are_shares() -> None:
    labels = torch.tensor([0, 1, 1])
    assert LabelPrior([3, 1]).log_prob(labels).exp().tolist() == pytest.approx([3 / 4, 1 / 4, 1 / 4])
    assert LabelPrior(torch.tensor([3, 1])).log_prob(labels).exp().tolist() == pytest.approx([3 / 4, 1 / 4, 1 / 4])
    assert LabelPrior(5).log_prob(labels).exp().tolist() == pytest.approx([1 / 5] * 3)
    assert not list(LabelPrior(5).parameters())


@pytest.mark.parametrize("counts", [[1.0, 0.0], [], [1.0, -2.0], [1.0, math.nan], 0])
def test_a_prior_that_makes_everything_infinite_is_refused(counts: list[float] | int) -> None:
    with pytest.raises(UnsupportedError):
        LabelPrior(counts)


def test_what_are_no_labels_is_refused() -> None:
    with pytest.raises(MismatchError, match="from 0 to 2; got 3"):
        given().log_prob(torch.tensor([3, 0]), LOGITS)
    with pytest.raises(MismatchError, match="int64"):
        given().log_prob(torch.tensor([1.0, 0.0]), LOGITS)
    with pytest.raises(MismatchError, match="one y for each x"):
        given().log_prob(torch.tensor([1]), LOGITS)
    with pytest.raises(MismatchError, match="gives \\[2, 3\\] for 2 examples"):
        Classifier(torch.nn.Identity(), 4).log_prob(torch.tensor([1, 1]), LOGITS)
    with pytest.raises(MismatchError, match="from 0 to 1; got -1"):
        LabelPrior(2).log_prob(torch.tensor([-1]))
    with pytest.raises(MismatchError, match="from 0 to 1; got 2"):
        LabelToText(2, 2, **TINY).sample(torch.tensor([2]), 1)


def test_the_texts_of_each_label_sum_to_one() -> None:
    model = LabelToText(2, 3, **TINY).eval()
    every = pad([list(s) for n in range(4) for s in itertools.product(range(2), repeat=n)])
    log_probs = [model.log_prob(every, torch.full((len(every),), label)) for label in range(3)]
    for one in log_probs:
        assert one.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert not torch.allclose(log_probs[0], log_probs[1], atol=1e-3)
    found, best = model.beam(torch.arange(3), len(every))
    torch.testing.assert_close(best[1], log_probs[1].detach().sort(descending=True)[0], atol=1e-4, rtol=0)
    again = model.log_prob(flat(found), repeat(torch.arange(3), len(every)))
    torch.testing.assert_close(best.flatten(), again.detach(), atol=1e-4, rtol=0)


def test_a_label_chooses_the_text_that_it_was_shown_with() -> None:
    model = LabelToText(2, 2, dropout=0.0, **TINY)
    labels, texts = torch.tensor([0, 1]), pad([[0, 0], [1]])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        (-model.log_prob(texts, labels).sum()).backward()
        optimizer.step()
    drawn = model.sample(labels, 5, generator=torch.Generator().manual_seed(0))
    drawn, wanted = same_width([drawn, texts])
    assert (drawn == wanted[:, None]).all(-1).double().mean() > 0.7


def test_a_saved_text_model_comes_back(tmp_path: Path) -> None:
    model = LabelToText(2, 2, **TINY).eval()
    model.save(tmp_path)
    arguments = pad([[1], [0, 1]]), torch.tensor([1, 0])
    assert torch.equal(LabelToText.load(tmp_path).log_prob(*arguments), model.log_prob(*arguments))
