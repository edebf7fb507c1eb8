# SPDX-License-Identifier: Apache-2.0
"""Dual inference: the equation, the order of candidates, and the choice of the weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline import DataError, MismatchError, UnsupportedError
from paceline_dual.choose import Candidates, choose, exact_match
from paceline_dual.inference import DualInference
from paceline_dual.sequences import pad
from tables import SHORT, Chances, Sequences, Table, Told, from_joint, task

X = torch.arange(5)


def pair(weight: float = 0.5, beam: int = 5, seed: int = 0, **more: object) -> DualInference:
    one = task(5, seed)
    return DualInference(one.primal, one.dual, one.prior, weight=weight, beam=beam, **more)  # type: ignore[arg-type]


def test_the_score_is_that_of_the_equation() -> None:
    source = task(5, 7).prior
    models = pair(0.3, prior_source=source)
    y = torch.tensor([4, 0, 1, 1, 3])
    a, b = models.primal.log_prob(y, X), models.dual.log_prob(X, y)
    expected = 0.3 * a + 0.7 * (b + models.prior_target.log_prob(y) - source.log_prob(X))
    found = models.score(y, X)
    torch.testing.assert_close(found, expected.detach())
    assert not found.requires_grad
    with pytest.raises(UnsupportedError, match="give prior_source, or use rank"):
        pair().score(y, X)


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_a_beam_as_wide_as_there_are_classes_is_exact(weight: float) -> None:
    models = pair(weight)
    every = [torch.full_like(X, label) for label in range(5)]
    scores = torch.stack(
        [
            weight * models.primal.log_prob(y, X)
            + (1 - weight) * (models.dual.log_prob(X, y) + models.prior_target.log_prob(y))
            for y in every
        ],
        1,
    ).detach()
    assert models.best(X).equal(scores.argmax(1))
    ranking = models.rank(X, 3)
    torch.testing.assert_close(ranking.scores, scores.sort(descending=True).values[:, :3])
    torch.testing.assert_close(scores.gather(1, ranking.y), ranking.scores)


def test_weight_one_is_the_primal_models_own_ranking() -> None:
    models = pair(1.0, 4)
    own, scores = models.primal.beam(X, 4)
    ranking = models.rank(X)
    assert ranking.y.equal(own) and ranking.scores.equal(scores)
    even = Table(torch.zeros(2, 6))
    tied = DualInference(even, Table(torch.zeros(6, 2)), Chances(torch.zeros(6)), beam=6)
    for weight in (0.0, 0.5, 1.0):
        assert tied.weighted(weight).rank(torch.tensor([1])).y.tolist() == [[0, 1, 2, 3, 4, 5]], "ties keep its order"


def test_one_joint_gives_one_order_at_every_weight() -> None:
    joint = torch.rand(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    forward, backward, prior_x, prior_y = from_joint(joint)
    models = DualInference(forward, backward, prior_y, prior_x, beam=4)
    y = torch.tensor([0, 1, 2, 3, 0])
    for weight in (0.0, 0.4, 1.0):
        assert models.weighted(weight).rank(X).y.equal(forward.beam(X, 4)[0])
        torch.testing.assert_close(models.weighted(weight).score(y, X), forward.log_prob(y, X).detach())


def test_sequences_of_several_widths() -> None:
    one = task(len(SHORT), 3, Sequences)
    models = DualInference(one.primal, one.dual, one.prior, beam=len(SHORT), weight=0.4)
    x = pad([[1], [2]])
    total = 0.4 * one.primal.every(x) + 0.6 * torch.stack(
        [one.dual.log_prob(x, y.expand(2, 2)) + one.prior.log_prob(y.expand(2, 2)) for y in Sequences.every], 1
    )
    best = models.best(x)
    assert best.equal(Sequences.every[total.argmax(1)])
    wrong = models.rank(pad([[]])).y[:, 1]
    heldout = [(x, best), (pad([[1, 2]]), models.best(pad([[1, 2]]))), (pad([[]]), wrong)]
    assert models.tune(heldout, grid=[0.4]).value == 0.75


def test_missing_candidates_come_last_whatever_is_thought_of_them() -> None:
    one = task(5)
    told = Told(one.primal)
    told.samples, told.scores = torch.tensor([[3, 4, 0]]), torch.tensor([[-1.0, -2.0, -torch.inf]], dtype=torch.float64)
    sure = Chances(torch.tensor([50.0, 0.0, 0.0, 0.0, 0.0]))
    for weight in (0.0, 0.5, 1.0):
        ranking = DualInference(told, one.dual, sure, weight=weight, beam=3).rank(X[:1])
        assert ranking.y[0, 2] == 0 and ranking.scores[0, 2] == -torch.inf
        assert ranking.scores[0, :2].isfinite().all()


def test_an_opinion_without_weight_is_not_looked_at() -> None:
    never = torch.tensor([[-torch.inf, -3.0]])
    candidates = Candidates(torch.tensor([[7, 8]]), torch.tensor([[-1.0, -2.0]]), never)
    assert candidates.ranking(1.0).scores.tolist() == [[-1.0, -2.0]]
    assert candidates.ranking(0.5).scores.tolist() == [[-2.5, -torch.inf]]
    assert candidates.best(1.0).tolist() == [7] and candidates.best(0.0).tolist() == [8]


class Noisy(nn.Module):
    """Falls apart when dropout is on, and counts how often it is run."""

    def __init__(self, inner: Table | Chances) -> None:
        super().__init__()
        self.inner, self.runs, self.dropout = inner, 0, nn.Dropout(0.9)

    def log_prob(self, *things: Tensor) -> Tensor:
        self.runs += 1
        return self.dropout(self.inner.log_prob(*things))

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.runs += 1
        assert isinstance(self.inner, Table)
        y, scores = self.inner.beam(x, k)
        return y, self.dropout(scores)


def noisy() -> tuple[DualInference, list[Noisy]]:
    models = [Noisy(one) for one in task(5)]
    return DualInference(models[0], models[1], models[2], prior_source=models[2]), models  # type: ignore[arg-type]


def test_dropout_is_off_and_then_as_it_was() -> None:
    inference, models = noisy()
    models[1].eval()
    models[1].dropout.train()
    assert inference.rank(X).scores.equal(pair().rank(X).scores)
    y = torch.tensor([4, 0, 1, 1, 3])
    assert inference.score(y, X).equal(pair(prior_source=task(5).prior).score(y, X))
    assert [(one.training, one.dropout.training) for one in models] == [(True, True), (False, True), (True, True)]


def test_the_weight_is_found_and_every_model_runs_once_a_batch() -> None:
    """Right is what a weight of 0.3 says, so that no other weight is right everywhere."""
    inference, models = noisy()
    right = pair(0.3).best(X)
    own, alone = pair(1.0).best(X), pair(0.0).best(X)
    assert not right.equal(own) and not right.equal(alone)
    choice = inference.tune([(X[:3], right[:3]), (X[3:], right[3:])])
    assert [one.runs for one in models] == [2, 2, 2]
    assert choice.value == 1.0 and len(choice.tried) == 21
    assert pair(choice.weight).best(X).equal(right)
    assert dict(choice.tried)[1.0] == exact_match(own, right) and dict(choice.tried)[0.0] == exact_match(alone, right)
    assert inference.weighted(choice.weight).best(X).equal(right)


def test_among_equals_the_largest_weight_wins() -> None:
    candidates = Candidates(torch.tensor([[0, 1]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.0]]))
    choice = choose([(candidates, torch.tensor([0]))], exact_match, [0.5, 1.0, 0.0])
    assert (choice.weight, choice.value) == (1.0, 1.0)
    assert choice.tried == ((0.5, 1.0), (1.0, 1.0), (0.0, 1.0))


def test_exact_match() -> None:
    assert exact_match(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 3])) == pytest.approx(2 / 3)
    assert exact_match(pad([[1, 2], [0], []]), pad([[1, 2, 0], [0], []])) == pytest.approx(2 / 3)


def test_what_cannot_be() -> None:
    with pytest.raises(UnsupportedError, match=r"share between 0 and 1, got 1\.5"):
        pair(1.5)
    with pytest.raises(UnsupportedError, match="at least 1 wide, got 0"):
        pair(beam=0)
    with pytest.raises(UnsupportedError, match="k is between 1 and the beam's width, 5; got 6"):
        pair().rank(X, 6)
    with pytest.raises(MismatchError, match="without rows"):
        pair().best(X[:0])
    with pytest.raises(MismatchError, match="got 5 and 4"):
        pair().tune([(X, X[:4])])
    with pytest.raises(DataError, match="there are none"):
        pair().tune([])
    with pytest.raises(UnsupportedError, match="the grid of weights is empty"):
        pair().tune([(X, X)], grid=[])
    with pytest.raises(UnsupportedError, match="share between 0 and 1, got -1"):
        pair().tune([(X, X)], grid=[0.5, -1])
    with pytest.raises(UnsupportedError, match=r"the measure is nan at the weight 0\.5"):
        pair().tune([(X, X)], lambda found, right: float("nan"), [0.5])
