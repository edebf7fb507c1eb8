# SPDX-License-Identifier: Apache-2.0
"""The model against its equations: every half-step in its place, every word a probability, every gradient right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import CheckpointError, MismatchError, UnsupportedError
from paceline_lightrnn import PADDING, LightRNN, State, WordTable

CELLS = ("lstm", "gru", "rnn")
TABLES = {
    "full": WordTable.random(12, 3, 4, seed=1),
    "with empty cells": WordTable.random(10, 3, 4, seed=2),
    "with rows without words": WordTable(torch.tensor([0, 1, 3, 12, 15, 13]), 4, 4),
    "of one row": WordTable.random(7, 1, 8, seed=3),
    "of one column": WordTable.random(7, 8, 1, seed=4),
    "of one word": WordTable.random(1),
}


def make(table: WordTable | None = None, dimension: int = 5, seed: int = 0, **choices: Any) -> LightRNN:
    torch.manual_seed(seed)
    model = LightRNN(TABLES["full"] if table is None else table, dimension, **choices)
    with torch.no_grad():  # far from where it begins, so that every mistake shows
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.double()


def random_words(model: LightRNN, batch: int = 3, length: int = 4) -> Tensor:
    return torch.randint(model.table.words, (batch, length), generator=torch.Generator().manual_seed(8))


def by_hand(model: LightRNN, words: Tensor, first: int = 0) -> Tensor:
    """log P, shape [B, T], word by word and half-step by half-step, with the one-step twin of the model's cell."""
    twin: Any = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}[model.cell]
    cell = twin(model.dimension, model.dimension).double()
    cell.load_state_dict({n.removesuffix("_l0"): p for n, p in model.recurrent.state_dict().items()})
    table, found = model.table, torch.zeros(words.shape, dtype=torch.float64)
    for b, sequence in enumerate(words.tolist()):
        last, state = first, cell(model.row_in[table.row[first]])
        for t, word in enumerate(sequence):
            row, column = int(table.row[word]), int(table.column[word])
            state = cell(model.column_in[table.column[last]], state)
            h = state[0] if model.cell == "lstm" else state
            scores = model.row_out @ h + model.row_bias
            scores[[not any(c >= 0 for c in line) for line in table.word.tolist()]] = -float("inf")
            found[b, t] = scores.log_softmax(0)[row]
            state = cell(model.row_in[row], state)
            h = state[0] if model.cell == "lstm" else state
            scores = model.column_out @ h + model.column_bias
            scores[table.word[row] < 0] = -float("inf")
            found[b, t] += scores.log_softmax(0)[column]
            last = word
    return found


# -- the equations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kind", TABLES)
def test_every_half_step_is_in_its_place(cell: str, kind: str) -> None:
    model = make(TABLES[kind], cell=cell)
    words = random_words(model)
    torch.testing.assert_close(model.log_prob(words)[0], by_hand(model, words))


def test_a_sequence_in_two_parts_is_the_sequence() -> None:
    model = make(layers=2)
    words = random_words(model, length=7)
    whole, end = model.log_prob(words)
    first, state = model.log_prob(words[:, :3])
    second, state = model.log_prob(words[:, 3:], state.detach())
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    torch.testing.assert_close(state, end)
    assert torch.equal(end.last, words[:, -1])


def test_what_came_before_the_first_word_counts() -> None:
    model = make()
    words = random_words(model)
    torch.testing.assert_close(model.log_prob(words, model.begin(3, word=7))[0], by_hand(model, words, first=7))


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("layers", [1, 2])
def test_the_probabilities_of_all_words_sum_to_one(kind: str, layers: int) -> None:
    model = make(TABLES[kind], layers=layers, cell="gru")
    state = model.log_prob(random_words(model))[1]
    log_probs = model.distribution(state)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(3, dtype=torch.float64))
    for word in range(model.table.words):
        torch.testing.assert_close(log_probs[:, word], model.log_prob(torch.full((3, 1), word), state)[0][:, 0])


def test_the_distribution_in_pieces_is_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(TABLES["with rows without words"])
    whole = model.distribution(model.begin(3))
    monkeypatch.setattr("paceline_lightrnn.model.AT_ONCE", 1)
    torch.testing.assert_close(model.distribution(model.begin(3)), whole)


@pytest.mark.parametrize("kind", ["full", "with rows without words"])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_finite_differences(kind: str, tied: bool) -> None:
    model = make(TABLES[kind], dimension=2, tied=tied)
    words = random_words(model, 2, 3)
    words[1, 2] = PADDING
    names, values = zip(*model.named_parameters(), strict=True)

    def loss(*values: Tensor) -> Any:
        changed = dict(zip(names, values, strict=True))
        return torch.func.functional_call(model, changed, (words,), tie_weights=True)[0]

    assert torch.autograd.gradcheck(loss, tuple(value.detach().requires_grad_() for value in values))


def test_padding_costs_nothing_and_changes_nothing() -> None:
    model = make(WordTable(torch.tensor([2, 3]), 2, 2))  # row 0 has no words, so that a careless softmax gives nan
    words = torch.tensor([[0, 1, 1], [1, PADDING, PADDING], [PADDING, PADDING, PADDING]])
    log_probs = model.log_prob(words)[0]
    torch.testing.assert_close(log_probs[1:, 1:], torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(log_probs[1, 0], model.log_prob(words[1:2, :1])[0][0, 0])
    loss = model.loss(words)[0]
    torch.testing.assert_close(loss, -log_probs.sum() / 4)
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert float(model.loss(words[2:])[0].detach()) == 0.0


def test_the_halves_are_what_the_costs_need() -> None:
    model = make()
    words = random_words(model)
    h_row, h_column, state = model.halves(words, model.begin(3))
    assert h_row.shape == h_column.shape == (3, 4, 5)
    rows = model.row_logits(h_row).log_softmax(-1).gather(2, model.table.row[words][..., None])[..., 0]
    columns = model.column_logits(h_column).log_softmax(-1).gather(2, model.table.column[words][..., None])[..., 0]
    log_probs, end = model.log_prob(words)
    torch.testing.assert_close(rows + columns, log_probs)
    torch.testing.assert_close(model.log_prob_of_halves(words, h_row, h_column), log_probs)
    torch.testing.assert_close(state, end)


def test_perplexity_is_that_of_the_mean() -> None:
    model = make(WordTable.random(9))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model.perplexity(random_words(model)) == pytest.approx(9.0)


# -- as a module -------------------------------------------------------------------------------------------------------


def test_parameters_are_named_shared_and_begin_as_said() -> None:
    model = LightRNN(TABLES["full"], 6, layers=2)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if "recurrent" not in name}
    assert shapes == {
        "row_in": (3, 6),
        "column_in": (4, 6),
        "row_out": (3, 6),
        "column_out": (4, 6),
        "row_bias": (3,),
        "column_bias": (4,),
    }
    assert not list(model.buffers())
    assert 0.05 < float(model.row_in.detach().abs().max()) <= 0.1
    for name, bias in model.recurrent.state_dict().items():
        if name.startswith("bias"):
            forget = 6.0 if name.startswith("bias_ih") else 0.0
            assert (float(bias[6:12].sum()), float(bias.abs().sum())) == (forget, forget)
    tied = LightRNN(TABLES["full"], 6, tied=True)
    assert tied.row_out is tied.row_in and tied.column_out is tied.column_in
    assert {name for name, _ in tied.named_parameters()}.isdisjoint({"row_out", "column_out"})


def test_another_table_of_the_same_shape_may_come_and_no_other() -> None:
    model = make()
    words = random_words(model)
    before = model.log_prob(words)[0]
    old = model.table
    model.table = WordTable.random(12, 3, 4, seed=5)
    torch.testing.assert_close(model.log_prob(words)[0], by_hand(model, words))
    assert not torch.allclose(model.log_prob(words)[0], before)
    with pytest.raises(MismatchError, match="12 words in 3 x 4 cells, the new one 12 in 4 x 3"):
        model.table = WordTable.random(12, 4, 3)
    with pytest.raises(MismatchError, match="the new one 11 in"):
        model.table = WordTable.random(11, 3, 4)
    model.table = old
    torch.testing.assert_close(model.log_prob(words)[0], before)


def test_new_empty_cells_come_with_a_new_table() -> None:
    model = make(WordTable(torch.tensor([0, 1]), 2, 2))
    model.table = model.table.with_cells(torch.tensor([2, 1]))
    torch.testing.assert_close(model.distribution(model.begin(2)).exp().sum(1), torch.ones(2, dtype=torch.float64))


def test_dropout_in_training_only() -> None:
    model = make(dropout=0.5, layers=2)
    words = random_words(model)
    torch.manual_seed(1)
    one, other = model.log_prob(words)[0], model.log_prob(words)[0]
    assert not torch.allclose(one, other)
    model.eval()
    torch.testing.assert_close(model.log_prob(words)[0], model.log_prob(words)[0])


@pytest.mark.parametrize("cell", CELLS)
def test_half_precision_where_it_is_asked_for(cell: str) -> None:
    model = make(TABLES["with empty cells"], cell=cell, dimension=16).float()
    words = random_words(model)
    exact = model.log_prob(words)[0]
    with torch.autocast("cpu", torch.bfloat16):
        try:
            log_probs, state = model.log_prob(words)
        except RuntimeError as error:
            if "could not create a primitive" not in str(error):
                raise
            pytest.skip(f"this processor has no {cell} of half precision: {error}")
        again, state = model.log_prob(words, state)
        loss = -log_probs.mean()
    assert log_probs.dtype == again.dtype == torch.float32
    assert not torch.equal(log_probs, exact)
    torch.testing.assert_close(log_probs, exact, rtol=0.1, atol=0.1)
    assert model.log_prob(words, state.detach())[0].dtype == torch.float32  # what autocast left goes on without it
    loss.backward()
    assert model.row_in.grad is not None and bool(model.row_in.grad.isfinite().all())
    whole = model.bfloat16().log_prob(words)[0]
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, exact, rtol=0.2, atol=0.3)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"cell": "lstn"}, "no cell 'lstn'; there are gru, lstm, rnn"),
        ({"dropout": 1.0}, "dropout is a share"),
        ({"layers": 0}, "1 at least; got 5 and 0"),
    ],
)
def test_what_cannot_be_made_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        LightRNN(TABLES["full"], 5, **choices)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (torch.tensor([[0, 12]]), "0 to 11, or -1 for padding; got 0 to 12"),
        (torch.tensor([[-2, 1]]), "got -2 to 1"),
        (torch.tensor([[PADDING, 1]]), "end of a sequence only"),
        (torch.tensor([1, 2]), r"shape \[B, T\]"),
        (torch.tensor([[1.0]]), "integers"),
        (torch.empty(2, 0, dtype=torch.int64), "not empty"),
    ],
)
def test_words_that_are_none_are_refused(words: Tensor, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        make().log_prob(words)


def test_a_beginning_that_is_none_is_refused() -> None:
    with pytest.raises(MismatchError, match="got 1 and 12"):
        make().begin(1, word=12)
    with pytest.raises(MismatchError, match="got 0 and 0"):
        make().begin(0)


def test_states_can_be_picked() -> None:
    model = make()
    words = random_words(model)
    state = model.log_prob(words)[1]
    picked = state.select(torch.tensor([2, 0, 2]))
    assert isinstance(picked, State)
    following = torch.tensor([[1], [2], [3]])
    wanted = torch.stack(
        [
            model.log_prob(f[None], state.select(torch.tensor([s])))[0][0]
            for f, s in zip(following, (2, 0, 2), strict=True)
        ]
    )
    torch.testing.assert_close(model.log_prob(following, picked)[0], wanted)


# -- on disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [{}, {"tied": True, "cell": "gru", "layers": 2, "dropout": 0.25}])
def test_a_model_is_the_same_when_it_comes_back(tmp_path: Path, choices: dict[str, Any]) -> None:
    model = make(TABLES["with empty cells"], **choices).float()
    model.save(tmp_path / "deep" / "model")
    back = LightRNN.load(tmp_path / "deep" / "model")
    assert back.table == model.table and back.tied == model.tied and back.dropout.p == model.dropout.p
    assert (back.row_out is back.row_in) == back.tied
    words = random_words(model)
    assert torch.equal(back.eval().log_prob(words)[0], model.eval().log_prob(words)[0])
    names = sorted(path.name for path in (tmp_path / "deep" / "model").iterdir())
    assert names == ["model.json", "model.safetensors", "table.safetensors"]


def test_a_model_keeps_its_kind_of_numbers(tmp_path: Path) -> None:
    make().bfloat16().save(tmp_path)
    assert LightRNN.load(tmp_path).row_in.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "table.safetensors"])
def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path, name: str) -> None:
    make().save(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=name):
        LightRNN.load(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=name):
        LightRNN.load(tmp_path)


def test_a_save_that_fails_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    model.save(tmp_path)
    words = random_words(model)
    wanted = model.log_prob(words)[0]
    model.table = model.table.with_cells(model.table.cells.flip(0))

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr("paceline_lightrnn.table.save_file", full)
        model.save(tmp_path)
    assert torch.equal(LightRNN.load(tmp_path).log_prob(words)[0], wanted)
    model.save(tmp_path)
    assert not torch.equal(LightRNN.load(tmp_path).log_prob(words)[0], wanted)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_table_of_another_save_is_refused(tmp_path: Path) -> None:
    model = make()
    model.save(tmp_path)
    model.table.with_cells(model.table.cells.flip(0)).save(tmp_path / "table.safetensors")
    with pytest.raises(CheckpointError, match="another save"):
        LightRNN.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimension": 6}, r"column_bias|column_in of shape \(4, 5\), model.json makes it \(4, 6\)"),
        ({"dimension": 10**8}, "makes it"),
        ({"dimension": 10**12}, "no model that can be made"),
        ({"dimension": "5"}, "no model that can be made"),
        ({"layers": 2}, "of shape None"),
        ({"layers": 10**9}, "layers have more than"),
        ({"layers": "2"}, "no model that can be made"),
        ({"cell": "gru"}, "makes it"),
        ({"size": 2}, "no model that can be made"),
        (None, "lacks"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    make().save(tmp_path)
    path = tmp_path / "model.json"
    about = json.loads(path.read_text())
    about["model"] = None if change is None else {**about["model"], **change}
    path.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=message):
        LightRNN.load(tmp_path)
    path.write_text(json.dumps({**about, "format": "something else"}))
    with pytest.raises(CheckpointError, match="something else"):
        LightRNN.load(tmp_path)


def test_a_network_of_ten_words_learns_a_round_dance() -> None:
    torch.manual_seed(0)
    model = LightRNN(WordTable.random(10), 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    words = (torch.arange(8)[None] + torch.arange(10)[:, None]) % 10
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(words)[0].backward()
        optimizer.step()
    following = F.one_hot((words[:, -1] + 1) % 10, 10)
    found = model.distribution(model.log_prob(words)[1]).detach().exp()
    assert float((found * following).sum(1).min()) > 0.9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cell", CELLS)
def test_a_gpu_gives_the_same(cell: str) -> None:
    model = make(TABLES["with empty cells"], cell=cell, layers=2)
    words = random_words(model)
    wanted, best = model.log_prob(words)[0], model.next_words(model.begin(2), 3)
    model.cuda()
    assert model.table.cells.is_cuda
    model.table = WordTable.random(10, 3, 4, seed=2)  # a table of the CPU follows the model
    torch.testing.assert_close(model.log_prob(words.cuda())[0].cpu(), wanted)
    found = model.next_words(model.begin(2), 3)
    assert torch.equal(found[0].cpu(), best[0])
    model.loss(words.cuda())[0].backward()
    assert model.row_in.grad is not None and bool(model.row_in.grad.isfinite().all())


@pytest.mark.slow
def test_ten_million_words_train_in_sixty_megabytes() -> None:
    model = LightRNN(WordTable.random(10_000_000), 1000, tied=True)
    assert sum(p.numel() * p.element_size() for p in model.parameters()) <= 60e6
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    words = torch.randint(10_000_000, (20, 20))
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model.loss(words)[0]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(16.118, abs=0.1)  # the logarithm of ten million
    assert losses[1] < losses[0]
    drawn, _ = model.eval().draw(model.begin(20), 1.0, torch.Generator().manual_seed(0))
    assert drawn.unique().numel() > 10
