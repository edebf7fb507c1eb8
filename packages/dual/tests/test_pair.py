# SPDX-License-Identifier: Apache-2.0
"""A pair: what of it is trained, what is not, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dual_helpers import same_bits, state_of
from paceline import CheckpointError, UnsupportedError
from paceline_dual.classifier import Classifier, LabelPrior
from paceline_dual.pair import WEIGHTS, Pair
from tasks import LABELS, labels_pair, sequences, words_pair


def test_priors_are_frozen_and_no_part_of_what_is_trained() -> None:
    pair = words_pair()
    assert {name.split(".")[0] for name in pair.state_dict()} == {"forward_model", "backward_model"}
    trained = {id(p) for p in pair.parameters()}
    pair.train()
    for prior in pair.priors:
        assert not prior.training and all(not p.requires_grad and id(p) not in trained for p in prior.parameters())
    assert all(model.training for model in pair.models)


def test_priors_go_where_the_pair_goes() -> None:
    pair = words_pair().double()
    assert all(p.dtype == torch.float64 for module in (pair, *pair.priors) for p in module.parameters())


def test_directions_have_their_roles() -> None:
    pair = labels_pair()
    there, back = pair.direction("forward"), pair.direction("backward")
    assert there.primal is back.dual is pair.forward_model and back.primal is there.dual is pair.backward_model
    assert there.prior_target is back.prior_source is pair.prior_y
    assert there.prior_source is back.prior_target is pair.prior_x
    with pytest.raises(UnsupportedError, match="forward, backward; got 'up'"):
        pair.direction("up")


def test_shared_parameters_and_what_is_no_module_are_refused() -> None:
    table = nn.Embedding(LABELS, LABELS)
    model, prior, other = Classifier(table, LABELS), LabelPrior(LABELS), words_pair()
    with pytest.raises(UnsupportedError, match="the two models share 1 parameter;"):
        Pair(model, Classifier(table, LABELS), prior, prior)
    with pytest.raises(UnsupportedError, match="a model and a prior share"):
        Pair(other.forward_model, model, other.forward_model, prior)  # type: ignore[arg-type]
    for wrong in (object(), "model"):
        thing: Any = wrong
        with pytest.raises(UnsupportedError, match=r"prior_y has to be a torch\.nn\.Module, got a"):
            Pair(model, Classifier(nn.Embedding(LABELS, LABELS), LABELS), prior, thing)


@pytest.mark.parametrize("make", [labels_pair, words_pair], ids=["state dictionaries", "files of their own"])
def test_a_pair_comes_back_from_its_files(make: Any, tmp_path: Path) -> None:
    pair, again = make(), make(seed=1)
    pair.save(tmp_path)
    assert not same_bits(state_of(pair), state_of(again))
    again.load(tmp_path)
    assert same_bits(state_of(pair), state_of(again))
    for one, other in zip(pair.priors, again.priors, strict=True):
        assert same_bits(state_of(one), state_of(other))
    x = sequences(3, 5) if make is words_pair else torch.tensor([0, 1])
    assert torch.equal(pair.prior_x.log_prob(x), again.prior_x.log_prob(x))


def test_files_that_are_damaged_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    pair = labels_pair()
    pair.save(tmp_path)
    larger = labels_pair()
    larger.forward_model = Classifier(nn.Embedding(LABELS + 1, LABELS), LABELS)
    with pytest.raises(CheckpointError, match="does not fit the pair"):
        larger.load(tmp_path)
    path = tmp_path / "backward" / WEIGHTS
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"cannot read the weights of Classifier in .*train again"):
        pair.load(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        pair.load(tmp_path)
