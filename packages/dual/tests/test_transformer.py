# SPDX-License-Identifier: Apache-2.0
"""The small Transformers: probabilities that sum to 1, decoding that agrees with them, files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline import CheckpointError, MismatchError, UnsupportedError
from paceline_dual.protocols import Conditional, Prior, flat, repeat
from paceline_dual.sequences import pad, unpad
from paceline_dual.transformer import LanguageModel, Seq2Seq

X = pad([[0, 1, 2], [1], []])


def small(**options: int) -> Seq2Seq:
    sizes = {"dimension": 16, "layers": 2, "heads": 2, "longest": 3} | options
    model = Seq2Seq(3, 2, **sizes).eval()
    for parameter in model.parameters():  # far from uniform, so that nothing agrees by chance
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def everything(words: int, longest: int) -> Tensor:
    return pad([list(s) for n in range(longest + 1) for s in itertools.product(range(words), repeat=n)])


def test_the_models_are_what_the_protocols_ask_for() -> None:
    assert isinstance(small(), Conditional)
    assert isinstance(LanguageModel(2, 16), Prior)


def test_the_probabilities_of_all_sequences_sum_to_one() -> None:
    every = everything(2, 3)
    model = small()
    for x in X.split(1):
        assert model.log_prob(every, x.expand(len(every), -1)).exp().sum().item() == pytest.approx(1, abs=1e-5)
    language = LanguageModel(2, 16, heads=2, longest=3).eval()
    assert language.log_prob(every).exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_padding_and_neighbours_change_nothing() -> None:
    model = small()
    y = pad([[1], [0, 1, 1], []])
    together = model.log_prob(y, X)
    alone = torch.cat([model.log_prob(y[i : i + 1], X[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    wide = torch.nn.functional.pad(y, (0, 4), value=-1), torch.nn.functional.pad(X, (0, 9), value=-1)
    torch.testing.assert_close(model.log_prob(*wide), together, atol=1e-5, rtol=0)


def test_the_order_of_the_source_counts() -> None:
    model = small()
    y, x = pad([[1], [1]]), pad([[0, 1], [1, 0]])
    first, second = model.log_prob(y, x).tolist()
    assert abs(first - second) > 1e-4


@pytest.mark.parametrize("k", [1, 3, 20])
def test_the_beam_says_what_log_prob_says(k: int) -> None:
    model = small()
    found, log_probs = model.beam(X, k)
    assert found.shape[:2] == (3, k)
    there = log_probs.isfinite()
    assert there.sum(1).tolist() == [min(k, 15)] * 3  # 15 sequences of up to 3 of 2 symbols
    again = model.log_prob(flat(found), repeat(X, k)).view(3, k)
    torch.testing.assert_close(log_probs[there], again[there], atol=1e-4, rtol=0)


def test_a_wide_beam_is_the_exact_ranking() -> None:
    every, model = everything(2, 3), small()
    _, log_probs = model.beam(X, len(every))
    for row, x in enumerate(X.split(1)):
        exact = model.log_prob(every, x.expand(len(every), -1)).sort(descending=True)[0]
        torch.testing.assert_close(log_probs[row], exact.detach(), atol=1e-4, rtol=0)


def test_samples_are_as_frequent_as_log_prob_says() -> None:
    model, draws = small(longest=2), 3000
    found = model.sample(X, draws, generator=torch.Generator().manual_seed(0))
    every = everything(2, 2)
    for row, x in enumerate(X.split(1)):
        same = (torch.nn.functional.pad(found[row], (0, 2 - found.shape[-1]), value=-1)[:, None] == every).all(-1)
        seen = same.double().mean(0)
        wanted = model.log_prob(every, x.expand(len(every), -1)).double().exp()
        spread = (wanted * (1 - wanted) / draws).sqrt()
        assert bool(((seen - wanted).abs() < 4 * spread + 1e-3).all())


def test_sampling_is_without_dropout_and_gradient_and_leaves_the_mode() -> None:
    model = small().train()
    model.encoder.eval()
    found, log_probs = model.beam(X, 2)
    assert not log_probs.requires_grad
    assert model.training and model.writer.training and not model.encoder.training
    quiet = model.eval().beam(X, 2)
    assert torch.equal(found, quiet[0]) and torch.equal(log_probs, quiet[1])
    a, b = (model.sample(X, 4, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(a, b)


def test_dropout_acts_in_training_only() -> None:
    model = Seq2Seq(3, 2, 16, heads=2, dropout=0.5)
    y = pad([[1], [0], [1, 1]])
    assert not torch.equal(model.log_prob(y, X), model.log_prob(y, X))
    model.eval()
    assert torch.equal(model.log_prob(y, X), model.log_prob(y, X))


def test_every_parameter_learns() -> None:
    model = small()
    model.log_prob(pad([[0, 1], [1], []]), X).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0), name


def test_it_learns_to_turn_sequences_round() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Seq2Seq(4, 4, 32, 1, 2, 0.0, longest=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(120):
        x = torch.randint(0, 4, (64, 3), generator=generator)
        optimizer.zero_grad()
        (-model.log_prob(x.flip(1), x).mean()).backward()
        optimizer.step()
    x = torch.cartesian_prod(*[torch.arange(4)] * 3)
    found = unpad(model.beam(x, 2)[0][:, 0])
    assert sum(y == wanted for y, wanted in zip(found, x.flip(1).tolist(), strict=True)) > 58


def test_what_does_not_fit_is_refused() -> None:
    model = small()
    with pytest.raises(MismatchError, match="targets y have 4 symbols, this model writes 3"):
        model.log_prob(pad([[0, 0, 0, 0]]), X[:1])
    with pytest.raises(MismatchError, match="sources x have the symbol 3"):
        model.log_prob(pad([[0]]), pad([[3]]))
    with pytest.raises(MismatchError, match="one y for each x"):
        model.log_prob(pad([[0]]), X)
    with pytest.raises(MismatchError, match="at least 1"):
        model.sample(X, 0)
    with pytest.raises(UnsupportedError, match="multiple of 8"):
        Seq2Seq(2, 2, 20)
    with pytest.raises(UnsupportedError, match="longest is 0"):
        LanguageModel(2, 16, longest=0)
    with pytest.raises(UnsupportedError, match="dropout is 1"):
        LanguageModel(2, 16, dropout=1.0)


def test_no_examples_are_no_error() -> None:
    model, nothing = small(), torch.empty(0, 3, dtype=torch.int64)
    assert model.log_prob(nothing, nothing).shape == (0,)
    assert model.sample(nothing, 2).shape == (0, 2, 0)
    found, log_probs = model.beam(nothing, 2)
    assert found.shape == (0, 2, 0) and log_probs.shape == (0, 2)


@pytest.mark.parametrize("half", ["parameters", "autocast"])
def test_in_half_precision_the_sums_are_in_single(half: str) -> None:
    model, y = small(), pad([[1], [0, 1], []])
    exact = model.log_prob(y, X)
    model = model.bfloat16() if half == "parameters" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
        rough = model.log_prob(y, X)
        _, log_probs = model.beam(X, 2)
        assert model.sample(X, 2).shape[:2] == (3, 2)
    assert rough.dtype == torch.float32 and log_probs.dtype == torch.float32
    torch.testing.assert_close(rough, exact, atol=0.2, rtol=0.05)


def test_a_language_model_draws_what_it_scores() -> None:
    model = LanguageModel(3, 16, heads=2, longest=5)
    drawn = model.sample(7, generator=torch.Generator().manual_seed(0))
    assert drawn.shape[0] == 7 and drawn.shape[1] <= 5
    assert model.log_prob(drawn).shape == (7,)


@pytest.mark.parametrize("model", [small(), LanguageModel(3, 16, heads=2, longest=3)], ids=["pairs", "language"])
def test_a_saved_model_comes_back(model: Seq2Seq | LanguageModel, tmp_path: Path) -> None:
    model.eval().save(tmp_path)
    again = type(model).load(tmp_path)
    assert not again.training
    assert {n: p.requires_grad for n, p in again.named_parameters()} == {n: True for n, _ in model.named_parameters()}
    arguments = (pad([[1], [0, 1]]), X[:2])[: 2 if isinstance(model, Seq2Seq) else 1]
    assert torch.equal(again.log_prob(*arguments), model.log_prob(*arguments))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    model = small()
    model.save(tmp_path)
    weights, about = tmp_path / "model.safetensors", tmp_path / "model.json"
    with pytest.raises(CheckpointError, match="wanted is"):
        LanguageModel.load(tmp_path)
    good = about.read_text()
    for change in ({"dimension": 32}, {"layers": 10**9}, {"heads": 0}, {"colour": 1}):
        found = json.loads(good)
        found["model"] |= change
        about.write_text(json.dumps(found))
        with pytest.raises(CheckpointError, match=r"save (it|the model) again"):
            Seq2Seq.load(tmp_path)
    about.write_text(good)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged or"):
        Seq2Seq.load(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        Seq2Seq.load(tmp_path)
    about.write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        Seq2Seq.load(tmp_path)
