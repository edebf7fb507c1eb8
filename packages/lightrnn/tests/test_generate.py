# SPDX-License-Identifier: Apache-2.0
"""Generated text follows the model's probabilities, and a wide beam finds what trying everything finds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import MismatchError, UnsupportedError
from paceline_lightrnn import PADDING, LanguageModel, LightRNN, WordRNN, WordTable, beam, sample

MODELS = ("light", "full", "adaptive")


def make(kind: str = "light", words: int = 5, sharpness: float = 8.0) -> LanguageModel:
    torch.manual_seed(3)
    light = kind == "light"
    model = LightRNN(WordTable.random(words), 4) if light else WordRNN(words, 4, output=kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharpness)
    return model.double()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_further_is_the_same_by_any_way(kind: str) -> None:
    model = make(kind)
    words, state = model.draw(model.begin(4), 1.0, generator())
    torch.testing.assert_close(model.advance(model.begin(4), words), state)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("choices", [{}, {"temperature": 0.5}, {"top_k": 2}, {"top_k": 2, "temperature": 2.0}])
def test_samples_come_as_often_as_the_model_says(kind: str, choices: dict[str, Any]) -> None:
    model, count = make(kind), 4000
    words = sample(model, model.begin(count), 1, generator=generator(), **choices)[:, 0]
    log_probs = model.distribution(model.begin(1))[0].detach()
    if "top_k" in choices:
        log_probs[log_probs.argsort(descending=True)[2:]] = -float("inf")
    temperature = choices.get("temperature", 1.0)
    wanted = (log_probs / temperature).softmax(0)
    if kind == "light" and choices == {"temperature": 0.5}:  # row, then column, each with the temperature
        wanted = by_row_and_column(model, log_probs, temperature)
    found = words.bincount(minlength=5) / count
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=4 * 0.5 / count**0.5)


def by_row_and_column(model: Any, log_probs: Tensor, temperature: float) -> Tensor:
    joint = torch.zeros(model.table.shape, dtype=log_probs.dtype).flatten()
    joint[model.table.cells] = log_probs.exp()
    joint = joint.view(model.table.shape)
    rows = joint.sum(1, keepdim=True)
    sharp = (joint / rows) ** (1 / temperature)
    sharp = sharp / sharp.sum(1, keepdim=True) * (rows ** (1 / temperature) / (rows ** (1 / temperature)).sum())
    return sharp.flatten()[model.table.cells]


def test_the_nucleus_is_the_fewest_words_that_have_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_lightrnn.generate.FIRST_WORDS", 1)  # so that it has to be looked for in steps
    model = make(words=30, sharpness=4.0)
    shares, names = model.distribution(model.begin(1))[0].detach().exp().sort(descending=True)
    for top_p in (0.2, 0.6, 0.9):
        nucleus = set(names[: int((shares.cumsum(0) < top_p).sum()) + 1].tolist())
        drawn = sample(model, model.begin(3000), 1, top_p=top_p, generator=generator())
        assert set(drawn[:, 0].tolist()) <= nucleus
        assert len(nucleus) > 1 or top_p == 0.2
        best = sample(model, model.begin(200), 1, top_p=top_p, top_k=1, generator=generator())
        assert set(best[:, 0].tolist()) == {int(names[0])}
    everything = sample(model, model.begin(10), 2, top_p=1.0, generator=generator())
    assert everything.shape == (10, 2)


def test_the_same_generator_draws_the_same_and_dropout_is_off() -> None:
    torch.manual_seed(0)
    model = LightRNN(WordTable.random(50), 4, dropout=0.5)
    state = model.eval().begin(3)
    model.train()
    one = sample(model, state, 6, generator=generator(1))
    assert one.shape == (3, 6) and model.training
    assert torch.equal(sample(model, state, 6, generator=generator(1)), one)
    assert not torch.equal(sample(model, state, 6, generator=generator(2)), one)


def test_greedy_is_a_beam_of_one() -> None:
    model = make(words=20)
    greedy = sample(model, model.begin(3), 5, top_k=1)
    words, log_probs = beam(model, model.begin(3), 5, 1)
    assert torch.equal(words, greedy)
    torch.testing.assert_close(log_probs, model.log_prob(greedy)[0].sum(1))


def exhaustive(model: LanguageModel, state: Any, length: int, end: int | None, penalty: float) -> tuple[Any, float]:
    """The best of all continuations of one sequence, and its log P."""
    found = {}
    for words in itertools.product(range(model.words), repeat=length):
        if end in words:
            words = (*words[: words.index(end) + 1],)
        found[words] = float(model.log_prob(torch.tensor([words]), state)[0].detach().sum())
    best = max(found, key=lambda words: found[words] / len(words) ** penalty)
    return [*best, *[PADDING] * (length - len(best))], found[best]


@pytest.mark.parametrize("kind", ["light", "full"])
@pytest.mark.parametrize(("end", "penalty"), [(None, 0.0), (2, 0.0), (2, 1.0)])
def test_a_wide_beam_finds_the_best_of_all(kind: str, end: int | None, penalty: float) -> None:
    model = make(kind, words=4)
    state = model.log_prob(torch.tensor([[1, 3], [0, 2], [3, 3]]))[1]
    words, log_probs = beam(model, state, 3, 16, end=end, length_penalty=penalty)
    for line in range(3):
        best, log_prob = exhaustive(model, state.select(torch.tensor([line])), 3, end, penalty)
        assert words[line].tolist() == best
        assert float(log_probs[line]) == pytest.approx(log_prob)


def test_a_wider_beam_finds_what_greed_misses() -> None:
    found = []
    for seed in range(20):
        torch.manual_seed(seed)
        model = LightRNN(WordTable.random(9), 3).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(15)
        narrow, wide = (beam(model, model.begin(2), 4, width)[1] for width in (1, 9**3))
        found.append(bool((wide > narrow + 1e-6).any()))
        assert bool((wide >= narrow - 1e-9).all())
    assert any(found)


@pytest.mark.parametrize(
    "choices", [{"temperature": 0.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"length": 0}]
)
def test_samples_that_make_no_sense_are_refused(choices: dict[str, Any]) -> None:
    model = make()
    with pytest.raises(UnsupportedError, match="got"):
        sample(model, model.begin(1), **{"length": 1, **choices})


def test_other_wrong_numbers_are_refused() -> None:
    model = make()
    with pytest.raises(MismatchError, match="got 6"):
        sample(model, model.begin(1), 1, top_k=6)
    with pytest.raises(UnsupportedError, match="got 2 and 0"):
        beam(model, model.begin(1), 2, 0)
