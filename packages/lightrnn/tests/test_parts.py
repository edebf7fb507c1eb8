# SPDX-License-Identifier: Apache-2.0
"""The layers in models that are no LightRNN: a Transformer, a classifier of a hundred thousand classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import MismatchError, UnsupportedError
from paceline_lightrnn import TwoComponentEmbedding, TwoComponentSoftmax, WordTable

TABLES = {
    "full": WordTable.random(12, 3, 4, seed=1),
    "with empty cells": WordTable.random(10, 3, 4, seed=2),
    "with rows without words": WordTable(torch.tensor([0, 1, 3, 12, 15, 13]), 4, 4),
    "of one row": WordTable.random(7, 1, 8, seed=3),
}


def make(kind: str = "full", features: int = 5, **choices: Any) -> TwoComponentSoftmax:
    torch.manual_seed(0)
    layer = TwoComponentSoftmax(TABLES[kind], features, **choices)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer.double()


def vectors(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


# -- the embedding -----------------------------------------------------------------------------------------------------


def test_a_vector_is_made_of_row_and_column() -> None:
    table = TABLES["with empty cells"]
    ids = torch.arange(10).view(5, 1, 2)
    summed = TwoComponentEmbedding(table, 6)
    assert torch.equal(summed(ids)[3, 0, 1], summed.row[table.row[7]] + summed.column[table.column[7]])
    beside = TwoComponentEmbedding(table, 6, combine="concat")
    assert torch.equal(beside(ids)[3, 0, 1], torch.cat((beside.row[table.row[7]], beside.column[table.column[7]])))
    assert summed(ids).shape == beside(ids).shape == (5, 1, 2, 6)
    assert summed(torch.tensor(3)).shape == (6,)
    assert summed(torch.empty(0, 4, dtype=torch.int64)).shape == (0, 4, 6)


@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_its_numbers_are_as_large_as_those_of_an_ordinary_one(combine: str) -> None:
    embedding = TwoComponentEmbedding(WordTable.random(10_000), 64, combine=combine)
    assert float(embedding(torch.arange(10_000)).detach().std()) == pytest.approx(1.0, abs=0.05)
    parameters = sum(p.numel() for p in embedding.parameters())
    assert parameters == 200 * (64 if combine == "sum" else 32)


def test_padding_is_zero_and_learns_nothing() -> None:
    embedding = TwoComponentEmbedding(TABLES["full"], 4, padding_idx=-1)
    assert embedding.padding_idx == 11
    ids = torch.tensor([[3, 11], [11, 11]])
    found = embedding(ids)
    assert torch.equal(found != 0, torch.tensor([[True, False], [False, False]])[..., None].expand(2, 2, 4))
    found[1].sum().backward()
    assert all(float(p.grad.abs().sum()) == 0 for p in embedding.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("choices", "kind", "message"),
    [
        ({"combine": "product"}, UnsupportedError, "got 'product'"),
        ({"combine": "concat"}, UnsupportedError, "even with concat; got 5"),
        ({"padding_idx": 12}, MismatchError, "got 12"),
    ],
)
def test_an_embedding_that_makes_no_sense_is_refused(choices: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        TwoComponentEmbedding(TABLES["full"], 5, **choices)


def test_words_that_are_none_have_no_vector() -> None:
    with pytest.raises(MismatchError, match="got -1 to 3"):
        TwoComponentEmbedding(TABLES["full"], 4)(torch.tensor([3, -1]))


# -- the softmax -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TABLES)
def test_the_probabilities_are_those_of_the_equation(kind: str) -> None:
    layer, hidden = make(kind), vectors(3, 5)
    found = layer.log_prob(hidden)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(3, dtype=torch.float64))
    table = layer.table
    for word in range(table.words):
        row, column = int(table.row[word]), int(table.column[word])
        rows = (hidden @ layer.row_out.T + layer.row_bias).masked_fill(~(table.word >= 0).any(1), -float("inf"))
        u = layer.row_in[row]
        change = torch.tanh(hidden @ layer.step.weight[:5].T + layer.step.bias[:5] + u)
        gate = torch.sigmoid(hidden @ layer.step.weight[5:].T + layer.step.bias[5:] + layer.row_gate.weight @ u)
        after = gate * hidden + (1 - gate) * change
        columns = (after @ layer.column_out.T + layer.column_bias).masked_fill(table.word[row] < 0, -float("inf"))
        wanted = rows.log_softmax(1)[:, row] + columns.log_softmax(1)[:, column]
        torch.testing.assert_close(found[:, word], wanted)
        torch.testing.assert_close(layer(hidden, torch.full((3,), word)).output, wanted)


def test_the_face_is_that_of_the_adaptive_softmax() -> None:
    layer, hidden = make("with empty cells"), vectors(6, 5)
    target = torch.tensor([1, 2, 9, 0, 4, 4])
    output, loss = layer(hidden, target)
    log_probs = layer.log_prob(hidden)
    torch.testing.assert_close(output, log_probs.gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(loss, -output.mean())
    assert torch.equal(layer.predict(hidden), log_probs.argmax(1))
    words, best = layer.topk(hidden, 4)
    torch.testing.assert_close(best, log_probs.topk(4).values)
    assert torch.equal(words, log_probs.topk(4).indices)
    sequences = layer(hidden.view(2, 3, 5), target.view(2, 3))
    assert torch.equal(sequences.output, output.view(2, 3)) and torch.equal(sequences.loss, loss)


def test_the_best_of_many_words_need_few_rows() -> None:
    torch.manual_seed(0)
    layer = TwoComponentSoftmax(WordTable.random(10_000), 16)
    with torch.no_grad():
        layer.row_out.mul_(40)
    hidden = torch.randn(8, 16)
    found = layer.rank(hidden, 5)
    assert float(found.rows.float().mean()) < 30
    torch.testing.assert_close(found.log_probs, layer.log_prob(hidden).topk(5).values)


def test_the_whole_distribution_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, hidden = make("with empty cells"), vectors(3, 5)
    whole = layer.log_prob(hidden)
    monkeypatch.setattr("paceline_lightrnn.parts.AT_ONCE", 1)
    torch.testing.assert_close(layer.log_prob(hidden), whole)


@pytest.mark.parametrize("kind", ["full", "with rows without words"])
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    layer, target = make(kind, 3), torch.tensor([0, -100, 5])
    names = [name for name, _ in layer.named_parameters()]

    def loss(hidden: Tensor, *values: Tensor) -> Any:
        changed = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, changed, (hidden, target)).loss

    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(loss, (vectors(3, 3).requires_grad_(), *values))


def test_what_is_ignored_counts_nowhere() -> None:
    layer = make("with rows without words", ignore_index=-1)
    hidden = vectors(3, 5).requires_grad_()
    output, loss = layer(hidden, torch.tensor([-1, 3, -1]))
    torch.testing.assert_close(loss, layer(hidden[1:2], torch.tensor([3])).loss)
    assert output.tolist()[::2] == [0.0, 0.0]
    loss.backward()
    assert hidden.grad is not None and float(hidden.grad[0].abs().sum()) == 0.0
    assert float(layer(hidden.detach(), torch.full((3,), -1)).loss.detach()) == 0.0


def test_vectors_can_be_shared_with_the_embedding() -> None:
    embedding = TwoComponentEmbedding(TABLES["full"], 5)
    layer = TwoComponentSoftmax(TABLES["full"], 5, embedding=embedding)
    assert layer.row_out is layer.row_in is embedding.row and layer.column_out is embedding.column
    both = nn.ModuleList([embedding, layer])
    assert sum(p.numel() for p in both.parameters()) == 7 * 5 + 7 + 10 * 6 + 5 * 5
    torch.testing.assert_close(layer.log_prob(torch.randn(2, 5)).exp().sum(1), torch.ones(2))
    with pytest.raises(MismatchError, match="concat"):
        half = TwoComponentEmbedding(TABLES["full"], 6, combine="concat")
        TwoComponentSoftmax(TABLES["full"], 6, embedding=half)


def test_another_table_may_come() -> None:
    layer, embedding, hidden = make(), TwoComponentEmbedding(TABLES["full"], 5), vectors(2, 5)
    old, before = layer.table, layer.log_prob(hidden)
    layer.table = embedding.table = old.with_cells(old.cells.roll(1))
    torch.testing.assert_close(layer.log_prob(hidden).roll(-1, 1), before)
    assert torch.equal(embedding(torch.tensor(1)), embedding.row[old.row[0]] + embedding.column[old.column[0]])
    with pytest.raises(MismatchError, match="with_cells"):
        layer.table = TABLES["with empty cells"]


@pytest.mark.parametrize(
    ("hidden", "target", "message"),
    [
        ((2, 5), torch.tensor([0, 12]), "0 to 11, got 0 to 12"),
        ((2, 5), torch.tensor([0, -1]), "got -1 to 0"),
        ((2, 4), torch.tensor([0, 1]), r"shape \(2, 5\), got \(2, 4\)"),
        ((3, 5), torch.tensor([0, 1]), r"got \(3, 5\)"),
    ],
)
def test_targets_that_do_not_fit_are_refused(hidden: tuple[int, int], target: Tensor, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        make()(vectors(*hidden), target)


@pytest.mark.parametrize("choices", [{"features": 0}, {"dropout": 1.0}])
def test_a_layer_that_makes_no_sense_is_refused(choices: Any) -> None:
    with pytest.raises(UnsupportedError, match="got"):
        make(**choices)


# -- in models ---------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """A causal language model with both parts."""

    def __init__(self, words: int, width: int, tied: bool) -> None:
        super().__init__()
        table = WordTable.random(words)
        self.embedding = TwoComponentEmbedding(table, width)
        self.places = nn.Parameter(0.1 * torch.randn(64, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.output = TwoComponentSoftmax(table, width, embedding=self.embedding if tied else None)

    def hidden(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        found: Tensor = self.body(self.embedding(ids) + self.places[: ids.shape[1]], mask, is_causal=True)
        return found


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformer_learns_a_text(tied: bool) -> None:
    torch.manual_seed(0)
    model, words = Transformer(40, 32, tied), 40
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    following = torch.randperm(words)  # each word is followed by one other
    text = [torch.arange(words)]
    for _ in range(8):
        text.append(following[text[-1]])
    ids = torch.stack(text, 1)
    for _ in range(60):
        optimizer.zero_grad()
        model.output(model.hidden(ids[:, :-1]), ids[:, 1:]).loss.backward()
        optimizer.step()
    hidden = model.eval().hidden(ids[:, :-1])[:, -1]
    assert float((model.output.predict(hidden) == ids[:, -1]).float().mean()) > 0.9


def test_a_classifier_of_a_hundred_thousand_classes_is_small_and_learns() -> None:
    torch.manual_seed(0)
    classes, width = 100_000, 64
    layer = TwoComponentSoftmax(WordTable.random(classes), width)
    model = nn.Sequential(nn.Linear(20, width), nn.Tanh())
    optimizer = torch.optim.Adam([*model.parameters(), *layer.parameters()], lr=0.01)
    inputs, target = torch.randn(64, 20), torch.randint(classes, (64,))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = layer(model(inputs), target).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(11.5, abs=0.5)  # the logarithm of the number of classes
    assert losses[-1] < 1.0
    assert float((layer.predict(model(inputs)) == target).float().mean()) > 0.9
    ordinary = (width + 1) * classes
    assert ordinary / sum(p.numel() for p in layer.parameters()) > 80
