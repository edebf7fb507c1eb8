# SPDX-License-Identifier: Apache-2.0
"""A virtual dual task: its loss, what is trained by it, and a task where the auxiliary model knows more."""

from __future__ import annotations

import copy

import pytest
import torch

from paceline import MismatchError, UnsupportedError
from paceline_dual.learning import Reward, unlabelled_loss
from paceline_dual.virtual import VirtualPair
from tables import Chances, Table, task

X, Y, U = torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([2, 3, 3])


def test_a_step_is_likelihood_and_the_closed_loop() -> None:
    models = task(4)
    pair = VirtualPair(*models, Reward(0.3, 4), share=0.5)
    made = pair(X, Y, U, torch.Generator().manual_seed(1))
    other = unlabelled_loss(U, *models, Reward(0.3, 4), torch.Generator().manual_seed(1))
    likelihood = -models.primal.log_prob(Y, X).mean() - models.dual.log_prob(X, Y).mean()
    expected = likelihood + 0.5 * (other.loss_primal + other.loss_dual)
    assert made.loss.item() == pytest.approx(expected.item())
    assert made.unlabelled is not None and made.unlabelled.samples.equal(other.samples)
    warm = pair(X, Y)
    assert warm.unlabelled is None and warm.loss.item() == pytest.approx(likelihood.item())
    assert warm.primal.item() + warm.auxiliary.item() == pytest.approx(likelihood.item())


def test_both_models_are_trained_and_the_prior_is_not() -> None:
    models = task(4)
    pair = VirtualPair(*models)
    assert sorted(pair.state_dict()) == ["auxiliary.logits", "primal.logits"]
    pair(X, Y, U).loss.backward()
    assert models.primal.logits.grad is not None and models.dual.logits.grad is not None
    assert models.prior.logits.grad is None
    assert pair.alone() is models.primal and not models.primal.training


def test_a_copy_trains_the_copies() -> None:
    pair = VirtualPair(*task(4))
    other = copy.deepcopy(pair)
    other(X, Y, U).loss.backward()
    assert pair.primal.logits.grad is None and other.primal.logits.grad is not None


def test_the_primal_model_learns_of_what_it_saw_no_label() -> None:
    """x = 3 has no label anywhere; the auxiliary model, which holds that y = 2 makes it, is the only one to tell."""
    known = torch.full((4, 4), -3.0).fill_diagonal_(3.0)
    known[2, 3] = 3.0
    primal, auxiliary = Table(torch.zeros(4, 4)), Table(known)
    auxiliary.requires_grad_(False)
    pair = VirtualPair(primal, auxiliary, Chances(torch.tensor([0.0, 0.0, 0.0, -4.0])), Reward(0.5, 4))
    optimizer, drawn = torch.optim.SGD(primal.parameters(), lr=0.5), torch.Generator().manual_seed(0)
    x, u = torch.tensor([0, 1, 2]), torch.tensor([3] * 8)
    for _ in range(100):
        optimizer.zero_grad()
        pair(x, x, u, drawn).loss.backward()
        optimizer.step()
    assert pair.alone().beam(torch.arange(4), 1)[0][:, 0].tolist() == [0, 1, 2, 2]
    assert primal.every(torch.tensor([3])).exp()[0, 2].item() > 0.9


def test_what_cannot_be() -> None:
    models = task(4)
    with pytest.raises(UnsupportedError, match="one object"):
        VirtualPair(models.primal, models.primal, models.prior)
    with pytest.raises(UnsupportedError, match=r"the auxiliary model is trained and has to be an nn\.Module"):
        VirtualPair(models.primal, object(), models.prior)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="share is a weight, finite and at least 0, got -1"):
        VirtualPair(*models, share=-1)
    with pytest.raises(MismatchError, match="got 2 and 1"):
        VirtualPair(*models)(X, Y[:1])
