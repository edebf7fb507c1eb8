# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, made at random and small: nothing is fetched."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline_dual
from paceline import MismatchError, UnsupportedError
from paceline_dual.hugging_face import HuggingFaceLanguageModel, HuggingFaceSeq2Seq
from paceline_dual.protocols import Conditional, Prior, flat, repeat
from paceline_dual.sequences import pad

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

X = pad([[3, 4, 3], [5], []])
Y = pad([[4], [3, 5, 4], []])
WORDS = 6


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def bart() -> Any:
    sizes = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, **sizes
    )
    return transformers.BartForConditionalGeneration(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=5, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(scope="module", params=[t5, bart], ids=["t5", "bart"])
def model(request: pytest.FixtureRequest) -> HuggingFaceSeq2Seq:
    torch.manual_seed(0)
    made = HuggingFaceSeq2Seq(request.param(), longest=3).eval()
    for parameter in made.parameters():  # far from uniform
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


@pytest.fixture(scope="module")
def language() -> HuggingFaceLanguageModel:
    torch.manual_seed(0)
    return HuggingFaceLanguageModel(gpt2(), longest=3).eval()


def everything(end: int, longest: int) -> torch.Tensor:
    words = [word for word in range(WORDS) if word != end]
    return pad([list(s) for n in range(longest + 1) for s in itertools.product(words, repeat=n)])


def test_they_are_what_the_protocols_ask_for(model: HuggingFaceSeq2Seq, language: HuggingFaceLanguageModel) -> None:
    assert isinstance(model, Conditional) and isinstance(language, Prior)


def test_log_prob_is_the_models_own_loss_times_its_tokens(model: HuggingFaceSeq2Seq) -> None:
    for x, y in (([3, 4, 3], [4]), ([5], [3, 5]), ([], [])):
        loss = model.model(input_ids=torch.tensor([[*x, model.end]]), labels=torch.tensor([[*y, model.end]])).loss
        wanted = -loss * (len(y) + 1)
        torch.testing.assert_close(model.log_prob(pad([y]), pad([x]))[0], wanted, atol=1e-5, rtol=0)


def test_a_language_models_log_prob_is_its_own_loss_times_its_tokens(language: HuggingFaceLanguageModel) -> None:
    for x in ([3, 4], [4], []):
        tokens = torch.tensor([[5, *x, 1]])
        wanted = -language.model(input_ids=tokens, labels=tokens).loss * (len(x) + 1)
        torch.testing.assert_close(language.log_prob(pad([x]))[0], wanted, atol=1e-5, rtol=0)


def test_padding_and_neighbours_change_nothing(model: HuggingFaceSeq2Seq) -> None:
    together = model.log_prob(Y, X)
    alone = torch.cat([model.log_prob(Y[i : i + 1], X[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_the_probabilities_of_all_sequences_sum_to_one(
    model: HuggingFaceSeq2Seq, language: HuggingFaceLanguageModel
) -> None:
    every = everything(model.end, 3)
    with torch.no_grad():
        assert model.log_prob(every, X[:1].expand(len(every), -1)).exp().sum().item() == pytest.approx(1, abs=1e-4)
        every = everything(language.end, 3)
        assert language.log_prob(every).exp().sum().item() == pytest.approx(1, abs=1e-4)


def test_a_wide_beam_is_the_exact_ranking(model: HuggingFaceSeq2Seq) -> None:
    every = everything(model.end, 3)
    found, log_probs = model.beam(X, len(every))
    with torch.no_grad():
        exact = model.log_prob(every, X[1:2].expand(len(every), -1)).sort(descending=True)[0]
        again = model.log_prob(flat(found), repeat(X, len(every))).view_as(log_probs)
    torch.testing.assert_close(log_probs[1], exact, atol=1e-4, rtol=0)
    torch.testing.assert_close(log_probs, again, atol=1e-4, rtol=0)


def test_a_beam_without_a_cache_finds_the_same(model: HuggingFaceSeq2Seq, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cache = model.beam(X, 4)
    forward = model.model.forward

    def forgetful(*arguments: Any, **named: Any) -> Any:
        output = forward(*arguments, **named | {"use_cache": False})
        output["past_key_values"] = None
        return output

    monkeypatch.setattr(model.model, "forward", forgetful)
    without = model.beam(X, 4)
    assert torch.equal(without[0], with_cache[0])
    torch.testing.assert_close(without[1], with_cache[1], atol=1e-5, rtol=0)


def test_samples_are_as_frequent_as_log_prob_says(model: HuggingFaceSeq2Seq) -> None:
    draws = 1000
    found = model.sample(X, draws, generator=torch.Generator().manual_seed(0))
    found = torch.nn.functional.pad(found, (0, 3 - found.shape[-1]), value=-1)
    every = everything(model.end, 3)
    for row in range(3):
        with torch.no_grad():
            wanted = model.log_prob(every, X[row : row + 1].expand(len(every), -1)).double().exp()
        seen = (found[row][:, None] == every).all(-1).double().mean(0)
        assert seen.sum().item() == pytest.approx(1)
        assert bool(((seen - wanted).abs() < 4.5 * (wanted * (1 - wanted) / draws).sqrt() + 2e-3).all())


def test_a_language_model_draws_what_it_scores(language: HuggingFaceLanguageModel) -> None:
    drawn = language.sample(9, generator=torch.Generator().manual_seed(0))
    assert drawn.shape[0] == 9 and drawn.shape[1] <= 3 and not bool((drawn == language.end).any())
    assert language.log_prob(drawn).shape == (9,)


def test_tokens_put_before_x_and_y_are_given_and_not_scored() -> None:
    plain = bart()
    model = HuggingFaceSeq2Seq(plain, 3, source_begin=0, target_begin=4).eval()
    output = plain(input_ids=torch.tensor([[0, 3, 2]]), decoder_input_ids=torch.tensor([[2, 4, 5]]))
    log_probs = output.logits.log_softmax(-1)[0]
    torch.testing.assert_close(model.log_prob(pad([[5]]), pad([[3]]))[0], log_probs[1, 5] + log_probs[2, 2])
    found, best = model.beam(X, 3)
    torch.testing.assert_close(best, model.log_prob(flat(found), repeat(X, 3)).view(3, 3).detach(), atol=1e-5, rtol=0)


def test_it_learns(model: HuggingFaceSeq2Seq) -> None:
    model.log_prob(Y, X).sum().backward()
    grown = [parameter.grad is not None for parameter in model.parameters()]
    assert all(grown)
    model.zero_grad()


def test_what_does_not_fit_is_refused(model: HuggingFaceSeq2Seq) -> None:
    with pytest.raises(MismatchError, match="the model's end"):
        model.log_prob(pad([[model.end]]), pad([[3]]))
    with pytest.raises(MismatchError, match="4 symbols, this model writes 3"):
        model.log_prob(pad([[3, 3, 3, 3]]), pad([[3]]))
    with pytest.raises(MismatchError, match="symbol 6"):
        model.log_prob(pad([[3]]), pad([[6]]))
    with pytest.raises(UnsupportedError, match="no encoder-decoder"):
        HuggingFaceSeq2Seq(gpt2())
    with pytest.raises(UnsupportedError, match="no causal"):
        HuggingFaceLanguageModel(model.model)
    with pytest.raises(UnsupportedError, match="no encoder-decoder"):
        HuggingFaceSeq2Seq(torch.nn.Linear(2, 2))
    endless = gpt2()
    endless.config.eos_token_id = endless.generation_config.eos_token_id = None
    with pytest.raises(UnsupportedError, match=r"set model\.config\.eos_token_id"):
        HuggingFaceLanguageModel(endless)


def test_a_folder_of_transformers_is_read(tmp_path: Path, language: HuggingFaceLanguageModel) -> None:
    language.model.save_pretrained(tmp_path)
    again = HuggingFaceLanguageModel.from_pretrained(tmp_path, 3).eval()
    torch.testing.assert_close(again.log_prob(Y), language.log_prob(Y))


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'paceline-dual\[transformers\]'"):
        HuggingFaceSeq2Seq.from_pretrained("anything")


def test_the_package_is_imported_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    files = sorted(Path(paceline_dual.__file__).parent.glob("*.py"))
    assert any(path.name == "hugging_face.py" for path in files)
    for path in files:  # fresh copies: those that other tests use stay what they are
        name = f"copy_of_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
