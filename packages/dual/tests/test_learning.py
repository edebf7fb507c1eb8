# SPDX-License-Identifier: Apache-2.0
"""Dual learning: expected gradients over all samples that can come are those of J, computed exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline import MismatchError, UnsupportedError
from paceline_dual.learning import Reward, Unlabelled, unlabelled_loss
from paceline_dual.protocols import repeat
from paceline_dual.sequences import pad
from tables import SHORT, Chances, Labels, Sequences, Table, Task, Told, outcomes, slope, task

ONE, TWO = torch.tensor([2]), torch.tensor([0, 3])


def objective(s: Tensor, models: Task, alpha: float, per_token: bool = False) -> Tensor:
    """J, with the expectation summed over all y."""
    count = models.primal.logits.shape[1]
    y, s = models.primal.kind.thing(torch.arange(count).repeat(len(s))), repeat(s, count)
    r1, r2 = models.prior.log_prob(y), models.dual.log_prob(s, y)
    if per_token:
        r1, r2 = r1 / (1 + (y >= 0).sum(1)), r2 / (1 + (s >= 0).sum(1))
    found = models.primal.log_prob(y, s).exp() * (alpha * r1 + (1 - alpha) * r2)
    return found.detach().view(-1, count).sum(1).mean()


def estimates(s: Tensor, models: Task, settings: Reward) -> tuple[Tensor, Tensor, Tensor]:
    """Expected gradients of the two losses, and the variance of the primal one's, over all samples."""
    told = Told(models.primal)
    primal, dual = torch.zeros_like(models.primal.logits), torch.zeros_like(models.dual.logits)
    square = torch.zeros((), dtype=torch.float64)
    for samples, chance in outcomes(models.primal, s, settings.samples):
        told.samples = samples
        made = unlabelled_loss(s, told, models.dual, models.prior, settings)
        (of_primal,) = torch.autograd.grad(made.loss_primal, models.primal.logits, retain_graph=True)
        (of_dual,) = torch.autograd.grad(made.loss_dual, models.dual.logits)
        primal, dual = primal + chance * of_primal, dual + chance * of_dual
        square = square + chance * of_primal.square().sum()
    return primal, dual, square - primal.square().sum()


@pytest.mark.parametrize(
    ("baseline", "samples", "s"),
    [("none", 1, TWO), ("none", 2, ONE), ("leave_one_out", 2, TWO), ("leave_one_out", 3, ONE), ("other_rows", 1, TWO)],
)
def test_the_expected_gradients_are_those_of_the_objective(baseline: str, samples: int, s: Tensor) -> None:
    models, settings = task(4), Reward(alpha=0.3, samples=samples, baseline=baseline)
    primal, dual, _ = estimates(s, models, settings)
    torch.testing.assert_close(
        primal, -slope(lambda: objective(s, models, 0.3), models.primal.logits), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(dual, -slope(lambda: objective(s, models, 0.3), models.dual.logits), atol=1e-6, rtol=0)
    assert primal.abs().max() > 0.01 and dual.abs().max() > 0.01


@pytest.mark.parametrize("per_token", [False, True])
def test_of_sequences_too_with_sums_or_per_token(per_token: bool) -> None:
    models = task(len(SHORT), seed=1, kind=Sequences)
    s = pad([[1, 2], [0]])[1:, :1]  # a narrower batch than the samples
    primal, dual, _ = estimates(s, models, Reward(alpha=0.5, per_token=per_token))

    def value() -> Tensor:
        return objective(s, models, 0.5, per_token)

    torch.testing.assert_close(primal, -slope(value, models.primal.logits), atol=1e-6, rtol=0)
    torch.testing.assert_close(dual, -slope(value, models.dual.logits), atol=1e-6, rtol=0)


def test_a_baseline_lowers_the_variance_and_not_the_expectation() -> None:
    models = task(4)
    plain = estimates(TWO, models, Reward(alpha=0.3, baseline="none"))
    for baseline in ("leave_one_out", "other_rows"):
        better = estimates(TWO, models, Reward(alpha=0.3, baseline=baseline))
        torch.testing.assert_close(better[0], plain[0], atol=1e-12, rtol=0)
        assert better[2] < 0.8 * plain[2]


def test_the_dual_gradient_is_not_multiplied_by_the_reward() -> None:
    """What a known mistake would give is far from the objective's gradient, so the test above would find it."""
    models, alpha = task(4), 0.3
    wrong, told = torch.zeros_like(models.dual.logits), Told(models.primal)
    for samples, chance in outcomes(models.primal, ONE, 1):
        told.samples = samples
        made = unlabelled_loss(ONE, told, models.dual, models.prior, Reward(alpha, 1, "none"))
        (found,) = torch.autograd.grad(made.loss_dual * made.rewards[0, 0], models.dual.logits)
        wrong += chance * found
    right = -slope(lambda: objective(ONE, models, alpha), models.dual.logits)
    assert (wrong - right).abs().max() > 0.1 * right.abs().max()
    assert torch.nn.functional.cosine_similarity(wrong.flatten(), right.flatten(), dim=0) < 0  # rewards are below 0


def test_training_by_it_raises_the_objective() -> None:
    models, s, drawn = task(4), torch.arange(4), torch.Generator().manual_seed(3)
    before = float(objective(s, models, 0.3))
    optimizer = torch.optim.SGD([models.primal.logits, models.dual.logits], lr=0.5)
    for _ in range(150):
        made = unlabelled_loss(s, models.primal, models.dual, models.prior, Reward(0.3, 4), drawn)
        optimizer.zero_grad()
        (made.loss_primal + made.loss_dual).backward()
        optimizer.step()
    assert models.prior.logits.grad is None
    assert float(objective(s, models, 0.3)) > before + 0.5


def example(settings: Reward, s: Tensor = ONE) -> tuple[Unlabelled, Task]:
    models = task(4)
    return unlabelled_loss(s, models.primal, models.dual, models.prior, settings), models


def test_what_comes_back() -> None:
    models = task(4)
    told = Told(models.primal)
    told.samples = torch.tensor([[1, 3], [3, 3]])
    made = unlabelled_loss(TWO, told, models.dual, models.prior, Reward(0.25))
    r1 = models.prior.log_prob(told.samples.flatten()).detach().view(2, 2)
    r2 = torch.stack([models.dual.log_prob(s.expand(2), y) for s, y in zip(TWO, told.samples, strict=True)]).detach()
    torch.testing.assert_close(made.rewards, 0.25 * r1 + 0.75 * r2)
    assert [float(one) for one in (made.r1, made.r2)] == pytest.approx([float(r1.mean()), float(r2.mean())])
    assert float(made.r) == pytest.approx(float(made.rewards.mean()))
    assert made.loss_dual.item() == pytest.approx(-0.75 * float(r2.mean()))
    assert made.samples.equal(told.samples)
    assert not any(one.requires_grad for one in (made.r1, made.r2, made.r, made.rewards))
    # Two equal samples have nothing to tell: their row's part of the policy gradient is 0.
    (found,) = torch.autograd.grad(made.loss_primal, models.primal.logits)
    assert found[0].abs().max() > 0 and not found[3].any()


def test_samples_follow_the_generator() -> None:
    models = task(4)
    runs = [
        unlabelled_loss(TWO, *models, Reward(samples=8), torch.Generator().manual_seed(seed)).samples
        for seed in (1, 1, 2)
    ]
    assert runs[0].equal(runs[1]) and not runs[0].equal(runs[2])


def test_a_beam_takes_the_best_and_leaves_out_what_is_missing() -> None:
    models = task(4)
    whole = unlabelled_loss(TWO, *models, Reward(0.3, 3, search="beam"))
    assert whole.samples.equal(models.primal.beam(TWO, 3)[0])
    told = Told(models.primal)
    told.samples = whole.samples.clone()
    told.samples[1, 1:] = 0  # fillers, which are not to be scored
    told.scores = torch.tensor([[0.0, 0.0, 0.0], [0.0, -torch.inf, -torch.inf]])
    made = unlabelled_loss(TWO, told, models.dual, models.prior, Reward(0.3, 3, search="beam"))
    assert made.rewards.isnan().tolist() == [[False, False, False], [False, True, True]]
    assert float(made.r) == pytest.approx(float(whole.rewards[0].mean() + whole.rewards[1, 0]) / 2)
    (found,) = torch.autograd.grad(made.loss_primal, models.primal.logits)
    assert found[0].abs().max() > 0 and not found[3].any(), "one candidate alone has nothing to be compared with"


def test_a_row_alone_goes_without_the_other_rows() -> None:
    made, models = example(Reward(0.3, 1, "other_rows"))
    expected = -made.rewards[0, 0] * models.primal.log_prob(made.samples[:, 0], ONE)[0]
    assert made.loss_primal.item() == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha": 1.5}, "alpha is a share between 0 and 1, got 1.5"),
        ({"samples": 1}, "samples is at least 2 with the baseline leave_one_out, got 1"),
        ({"samples": 0, "baseline": "none"}, "samples is at least 1"),
        ({"baseline": "mean"}, "baseline is one of leave_one_out, other_rows, none; got 'mean'"),
        ({"search": "greedy"}, "search is one of sample, beam; got 'greedy'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        Reward(**settings)  # type: ignore[arg-type]


def test_what_is_impossible_is_named() -> None:
    models = task(4)
    prior = Chances(torch.tensor([0.0, 0.0, 0.0, -torch.inf]))
    told = Told(models.primal)
    told.samples = torch.tensor([[0, 3]])
    with pytest.raises(UnsupportedError, match=r"log P\(y\) by the prior is -inf at \[0, 1\] \(1 of 2\)"):
        unlabelled_loss(ONE, told, models.dual, prior, Reward())
    never = Table(torch.tensor([[-torch.inf, 0.0]] * 4))
    with pytest.raises(UnsupportedError, match=r"log P\(s \| y\) by the dual model is -inf"):
        unlabelled_loss(torch.tensor([0]), told, never, models.prior, Reward())


def test_nan_is_left_to_the_guard_of_a_run() -> None:
    models = task(4)
    with torch.no_grad():
        models.dual.logits.fill_(torch.nan)
    made = unlabelled_loss(ONE, *models, Reward())
    assert made.loss_primal.isnan() and made.loss_dual.isnan()


def test_shapes_that_do_not_fit() -> None:
    models = task(4)
    with pytest.raises(MismatchError, match="without rows"):
        unlabelled_loss(ONE[:0], *models, Reward())
    told = Told(models.primal)
    told.samples = torch.tensor([[0, 1, 2]])
    with pytest.raises(MismatchError, match=r"2 samples of each of 1 rows were asked for; the model returned \[1, 3\]"):
        unlabelled_loss(ONE, told, models.dual, models.prior, Reward())

    class Summed(Chances):
        def log_prob(self, x: Tensor) -> Tensor:
            return super().log_prob(x).sum()

    with pytest.raises(MismatchError, match=r"log P\(y\) by the prior has to be one number for each of 2 rows"):
        unlabelled_loss(ONE, models.primal, models.dual, Summed(models.prior.logits.detach(), Labels), Reward())
