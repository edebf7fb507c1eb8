# SPDX-License-Identifier: Apache-2.0
"""Dual supervised learning: the gap, each model's gradient with the other one held, weights and their course."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline import MismatchError, UnsupportedError
from paceline_dual.sequences import pad
from paceline_dual.supervised import ByLength, Duality, gap, supervised_loss
from tables import SHORT, Chances, Four, Sequences, Table, from_joint, slope, task

X, Y = torch.tensor([0, 1, 3, 3]), torch.tensor([2, 2, 0, 1])


def four(seed: int = 0) -> Four:
    one, other = task(4, seed), task(4, seed + 1)
    return Four(one.primal, one.dual, one.prior, other.prior)


def by_hand(x: Tensor, y: Tensor, models: Four) -> Tensor:
    """The gap, looked up number by number."""
    p = [table.logits.detach().softmax(-1) for table in models]  # type: ignore[attr-defined]
    forward, backward, prior_x, prior_y = p
    rows = [
        (prior_x[a] * forward[a, b] / (prior_y[b] * backward[b, a])).log()
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]
    return torch.stack(rows)


def test_the_gap_is_that_of_the_equation() -> None:
    models = four()
    torch.testing.assert_close(gap(X, Y, models), by_hand(X, Y, models))
    made = supervised_loss(X, Y, models, Duality(0.5, 0.0))
    assert made.gap is not None and not made.gap.requires_grad
    torch.testing.assert_close(made.gap, by_hand(X, Y, models))
    torch.testing.assert_close(made.forward, models.forward_model.log_prob(Y, X).detach())
    torch.testing.assert_close(made.backward, models.backward_model.log_prob(X, Y).detach())


def test_parts_of_one_joint_have_no_gap() -> None:
    joint = torch.rand(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.01
    models = from_joint(joint)
    x, y = (one.flatten() for one in torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij"))
    torch.testing.assert_close(gap(x, y, models), torch.zeros(20, dtype=torch.float64), atol=1e-12, rtol=0)
    made, plain = supervised_loss(x, y, models, Duality(3.0, 3.0)), supervised_loss(x, y, models)
    assert made.loss_forward.item() == pytest.approx(plain.loss_forward.item())


def test_each_loss_moves_its_own_model_and_as_the_equation_says() -> None:
    models, weights = four(), Duality(0.7, 0.2)
    made = supervised_loss(X, Y, models, weights)
    parameters = [table.logits for table in models]  # type: ignore[attr-defined]
    of_forward = torch.autograd.grad(made.loss_forward, parameters, retain_graph=True, allow_unused=True)
    of_backward = torch.autograd.grad(made.loss_backward, parameters, allow_unused=True)
    assert [one is not None for one in of_forward] == [True, False, False, False]
    assert [one is not None for one in of_backward] == [False, True, False, False]

    def loss(table: Table, y: Tensor, x: Tensor, weight: float) -> Callable[[], Tensor]:
        return lambda: (-table.log_prob(y, x) + weight * by_hand(X, Y, models) ** 2).mean()

    # A finite difference in one model's table leaves the other's, and the priors, as they are.
    forward, backward = models.forward_model, models.backward_model
    assert isinstance(forward, Table) and isinstance(backward, Table)
    torch.testing.assert_close(of_forward[0], slope(loss(forward, Y, X, 0.7), forward.logits), atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(of_backward[1], slope(loss(backward, X, Y, 0.2), backward.logits), atol=1e-7, rtol=1e-7)


def test_without_weight_it_is_the_plain_likelihood_to_the_bit() -> None:
    models = four()
    plain = -models.forward_model.log_prob(Y, X).mean(), -models.backward_model.log_prob(X, Y).mean()
    for duality in (None, Duality(0.0, 0.0), Duality(0.5, 0.5, warm=10).at(9), Duality(0.0, 0.5), Duality(0.5, 0.0)):
        made = supervised_loss(X, Y, models, duality)
        pairs = zip((made.loss_forward, made.loss_backward), plain, models, strict=False)
        for place, (loss, expected, model) in enumerate(pairs):
            if duality is None or (duality.forward, duality.backward)[place] == 0:
                logits = model.logits  # type: ignore[attr-defined]
                assert loss.item() == expected.item()
                found = torch.autograd.grad(loss, logits, retain_graph=True)[0]
                assert found.equal(torch.autograd.grad(expected, logits, retain_graph=True)[0])


def test_the_priors_are_not_run_where_nobody_needs_them() -> None:
    class Silent(Chances):
        def log_prob(self, x: Tensor) -> Tensor:
            raise AssertionError("asked")

    silent = Silent(torch.zeros(4))
    models = four()._replace(prior_x=silent, prior_y=silent)
    assert supervised_loss(X, Y, models, Duality(1.0, 1.0, warm=3).at(2)).gap is None
    with pytest.raises(AssertionError, match="asked"):
        supervised_loss(X, Y, models, Duality(1.0, 1.0, warm=3).at(3))


def test_the_weights_come_when_the_models_are_warm() -> None:
    duality = Duality(0.1, 0.2, warm=2)
    assert [duality.at(step).off for step in range(4)] == [True, True, False, False]
    assert duality.at(2) is duality
    assert not Duality(0.0, torch.zeros(4)).off, "a tensor is not looked into"


def test_weights_of_rows() -> None:
    models, rows = four(), torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64)
    expected = -models.forward_model.log_prob(Y, X).mean() + (rows * by_hand(X, Y, models) ** 2).mean()
    for weight in (rows, lambda x, y: rows):
        made = supervised_loss(X, Y, models, Duality(weight, 0.0))
        assert made.loss_forward.item() == pytest.approx(expected.item())


def test_weights_by_length() -> None:
    x, y = pad([[], [1], [2, 0]]), torch.tensor([0, 1, 2])
    assert ByLength(5.0)(x, y).tolist() == pytest.approx([25.0, 6.25, 25 / 9])
    assert ByLength(5.0, side="y")(x, y).tolist() == [25.0] * 3
    assert ByLength(30.0, side="y")(x, torch.zeros(3, 3, 32, 32)).tolist() == pytest.approx([(30 / 3072) ** 2] * 3)
    logits = torch.randn(len(SHORT), len(SHORT), generator=torch.Generator().manual_seed(0))
    prior, table = Chances(logits[0], Sequences), Table(logits, Sequences)
    models = Four(table, Table(logits.T, Sequences), prior, Chances(logits[1], Sequences))
    made = supervised_loss(x, x.flip(0), models, Duality(ByLength(2.0), 0.0))
    assert made.gap is not None
    expected = -made.forward.mean() + (torch.tensor([4.0, 1.0, 4 / 9]) * made.gap**2).mean()
    assert made.loss_forward.item() == pytest.approx(expected.item())


def test_what_cannot_be() -> None:
    models = four()
    with pytest.raises(UnsupportedError, match="forward is a weight, finite and at least 0, got -1"):
        Duality(-1.0)
    with pytest.raises(UnsupportedError, match="warm is a number of steps"):
        Duality(warm=-1)
    with pytest.raises(UnsupportedError, match="side is one of x, y; got 'z'"):
        ByLength(1.0, side="z")
    with pytest.raises(MismatchError, match="same number of rows, at least one; got 4 and 3"):
        supervised_loss(X, Y[:3], models)
    with pytest.raises(MismatchError, match="got 0 and 0"):
        gap(X[:0], Y[:0], models)
    with pytest.raises(
        MismatchError, match=r"the weight backward is one number, or one for each of 4 rows; got .*\[3\]"
    ):
        supervised_loss(X, Y, models, Duality(0.0, torch.ones(3)))
    with pytest.raises(UnsupportedError, match="the weight forward is at least 0 in every row, got -1"):
        supervised_loss(X, Y, models, Duality(lambda x, y: -torch.ones(4)))
    never = models._replace(prior_y=Chances(torch.tensor([-torch.inf, 0.0, 0.0, 0.0])))
    with pytest.raises(UnsupportedError, match=r"log P\(y\) by the prior is -inf at \[2\] \(1 of 4\)"):
        supervised_loss(X, Y, never, Duality())
