# SPDX-License-Identifier: Apache-2.0
"""Costs: the sums are those of the model's own log-probabilities, in both ways of holding them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline import MismatchError
from paceline_lightrnn import CostSource, DenseCosts, FactoredCosts, WordTable

WORDS, DIMENSION = 10, 5


class Outputs:
    """The output layers of a model, and nothing else."""

    def __init__(self, table: WordTable) -> None:
        make = torch.Generator().manual_seed(3)
        self.table = table
        self.row_out = torch.randn(table.rows, DIMENSION, generator=make)
        self.column_out = torch.randn(table.columns, DIMENSION, generator=make)
        self.row_bias = torch.randn(table.rows, generator=make)
        self.column_bias = torch.randn(table.columns, generator=make)

    def row_logits(self, h: Tensor) -> Tensor:
        return h @ self.row_out.T + self.row_bias

    def column_logits(self, h: Tensor) -> Tensor:
        return h @ self.column_out.T + self.column_bias


def batch(seed: int = 0, length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS - 1, (4, length), generator=make)
    words[1, 5:] = -1
    h = torch.randn(2, 4, length, DIMENSION, generator=make)
    return words, h[0], h[1]


def both(model: Outputs, *batches: tuple[Tensor, Tensor, Tensor]) -> tuple[DenseCosts, FactoredCosts]:
    dense = DenseCosts(WORDS, model.table.rows, model.table.columns)
    factored = FactoredCosts(WORDS, DIMENSION)
    for one in batches:
        dense.add(model, *one)
        factored.add(model, *one)
    return dense, factored


TABLES = [
    WordTable.random(WORDS, 2, 5, seed=1),
    WordTable.random(WORDS, 4, 4, seed=2),
    WordTable(torch.arange(WORDS), 5, 4),
]


def logs(model: Outputs, word: int, h_row: Tensor, h_column: Tensor) -> tuple[Tensor, Tensor]:
    """-log P of every row and every column for one position, the long way round."""
    row, column = model.row_logits(h_row), model.column_logits(h_column)
    rows = [i for i in range(model.table.rows) if (model.table.word[i] >= 0).any()]
    inside = model.table.word[model.table.row[word]] >= 0
    return row[rows].logsumexp(0) - row, column[inside].logsumexp(0) - column


@pytest.mark.parametrize("table", TABLES, ids=["full", "empty cells", "an empty row"])
def test_the_sums_are_those_of_each_position(table: WordTable) -> None:
    model = Outputs(table)
    words, h_row, h_column = batch()
    rows, columns = torch.zeros(WORDS, table.rows), torch.zeros(WORDS, table.columns)
    for b, t in np.ndindex(*words.shape):
        if words[b, t] >= 0:
            row, column = logs(model, int(words[b, t]), h_row[b, t], h_column[b, t])
            rows[words[b, t]] += row
            columns[words[b, t]] += column
    source = both(model, batch())[0].source(model)
    assert isinstance(source, CostSource)
    assert (source.words, source.rows, source.columns) == (WORDS, table.rows, table.columns)
    everything = np.arange(WORDS)
    torch.testing.assert_close(torch.from_numpy(source.row_costs(everything)), rows)
    torch.testing.assert_close(torch.from_numpy(source.column_costs(everything)), columns)


@pytest.mark.parametrize("table", TABLES, ids=["full", "empty cells", "an empty row"])
def test_factors_hold_the_same_sums(table: WordTable) -> None:
    model = Outputs(table)
    dense, factored = (x.source(model) for x in both(model, batch(0), batch(1, 6)))
    assert (factored.words, factored.rows, factored.columns) == (WORDS, table.rows, table.columns)
    some = np.array([7, 0, 9, 3])
    for name in ("row_costs", "column_costs"):
        mine, theirs = getattr(factored, name)(some), getattr(dense, name)(some)
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-4)


def test_sums_over_workers_are_the_sums_of_one() -> None:
    model = Outputs(TABLES[1])
    for one, first, second in zip(
        both(model, batch(0), batch(1)), both(model, batch(0)), both(model, batch(1)), strict=True
    ):
        for mine, other in zip(first.tensors(), second.tensors(), strict=True):
            mine += other
        everything = np.arange(WORDS)
        for name in ("row_costs", "column_costs"):
            mine, theirs = (getattr(x.source(model), name)(everything) for x in (first, one))
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-4)


def test_a_word_that_never_came_costs_nothing() -> None:
    model = Outputs(TABLES[0])
    for costs in both(model, batch()):
        assert not costs.source(model).row_costs(np.array([WORDS - 1])).any()


def test_states_of_half_precision_and_only_padding() -> None:
    model = Outputs(TABLES[1])
    words, h_row, h_column = batch()
    half = h_row.bfloat16(), h_column.bfloat16()
    rounded = half[0].float(), half[1].float()
    for one, two in zip(both(model, (words, *half)), both(model, (words, *rounded)), strict=True):
        for mine, theirs in zip(one.tensors(), two.tensors(), strict=True):
            assert torch.equal(mine, theirs)
    for costs in both(model, (torch.full_like(words, -1), h_row, h_column)):
        assert not any(x.any() for x in costs.tensors())


def test_no_gradient_is_kept() -> None:
    model = Outputs(TABLES[0])
    model.row_out.requires_grad_()
    words, h_row, h_column = batch()
    for costs in both(model, (words, h_row.requires_grad_(), h_column)):
        assert not any(x.requires_grad for x in costs.tensors())
        assert isinstance(costs.source(model).row_costs(np.array([0])), np.ndarray)


def test_other_weights_than_those_of_the_sums_are_refused() -> None:
    model = Outputs(TABLES[0])
    factored = both(model, batch())[1]
    source = factored.source(model)
    kept = source.row_costs(np.arange(3))
    model.row_out += 0.1
    assert np.array_equal(source.row_costs(np.arange(3)), kept)
    with pytest.raises(MismatchError, match="frozen"):
        factored.source(model)


def test_wrong_shapes_and_words_are_refused() -> None:
    model = Outputs(TABLES[0])
    words, h_row, h_column = batch()
    for costs in both(model):
        with pytest.raises(MismatchError, match=r"\(4, 7\)"):
            costs.add(model, words, h_row[:, :-1], h_column)
        with pytest.raises(MismatchError, match="got 10"):
            costs.add(model, words.clamp(max=-1) + 11, h_row, h_column)
        assert not any(x.any() for x in costs.tensors())
