# SPDX-License-Identifier: Apache-2.0
"""The best words: those that the whole distribution names, with few rows tried."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline import MismatchError
from paceline_lightrnn import LightRNN, WordTable, top_words


def ranked(table: WordTable, joint: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """`top_words` of log P [B, R, C] with the number of (sequence, row) pairs it asked for."""
    rows = joint.logsumexp(2)
    asked = []

    def columns(sequences: Tensor, chosen: Tensor) -> Tensor:
        asked.append(sequences.numel())
        return joint[sequences, chosen] - rows[sequences, chosen, None]

    return *top_words(rows, columns, table, k), sum(asked)


def random_joint(table: WordTable, batch: int, sharpness: float) -> Tensor:
    scores = sharpness * (torch.randn(batch, table.rows, 1) + torch.randn(batch, *table.shape)).double()
    scores = scores.masked_fill(table.word < 0, -float("inf"))
    return scores.flatten(1).log_softmax(1).view(scores.shape)


@pytest.mark.parametrize("words", [60, 64])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_the_best_are_those_of_the_whole_distribution(words: int, sharpness: float) -> None:
    table = WordTable.random(words, 16, 4)
    joint = random_joint(table, 7, sharpness)
    everything = joint.flatten(1)[:, table.cells]
    for k in (1, 3, 17, words):
        names, log_probs, _, _ = ranked(table, joint, k)
        torch.testing.assert_close(log_probs, everything.topk(k).values)
        assert torch.equal(names, everything.argsort(dim=1, descending=True)[:, :k])


def test_few_rows_are_tried_where_few_are_probable() -> None:
    table = WordTable.random(64 * 64)
    joint = torch.full((3, 64, 64), -20.0)
    joint[0, 5], joint[1, 6], joint[2] = 0.0, 3.0, 0.0  # the third sequence: everything is equally probable
    joint = joint.flatten(1).log_softmax(1).view(joint.shape)
    _, _, rows, asked = ranked(table, joint, 64)
    assert rows.tolist() == [4, 4, 64]
    assert asked == 4 + 4 + 64


def test_a_row_that_could_hold_a_better_word_is_tried() -> None:
    table = WordTable(torch.arange(64), 32, 2)
    joint = torch.full((1, 32, 2), -40.0)
    joint[0, :31] = torch.log(torch.tensor(0.02))  # 31 rows of probability 0.04, halved
    joint[0, 31, 1] = torch.log(torch.tensor(0.03))  # the last row by P(row), the best word
    names, _, rows, _ = ranked(table, joint, 1)
    assert names.tolist() == [[63]] and rows.tolist() == [32]


def test_equally_probable_words_come_in_ascending_order() -> None:
    table = WordTable.random(9, seed=2)
    names, log_probs, _, _ = ranked(table, torch.full((2, 3, 3), 1 / 9).log(), 9)
    assert names.tolist() == [list(range(9))] * 2
    torch.testing.assert_close(log_probs, torch.full((2, 9), 1 / 9).log())
    tied = ranked(table, torch.full((2, 3, 3), 1 / 9).log(), 4)
    assert all(len(set(line)) == 4 for line in tied[0].tolist())


@pytest.mark.parametrize("k", [0, 10])
def test_more_words_than_there_are_are_refused(k: int) -> None:
    with pytest.raises(MismatchError, match=f"1 to the number of words, 9; got {k}"):
        ranked(WordTable.random(9), torch.zeros(1, 3, 3), k)


def test_pieces_small_enough_for_memory_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    table = WordTable.random(60, 16, 4)
    joint = random_joint(table, 5, 0.5)
    whole = ranked(table, joint, 20)
    monkeypatch.setattr("paceline_lightrnn.ranking.AT_ONCE", 1)
    small = ranked(table, joint, 20)
    assert torch.equal(whole[0], small[0]) and torch.equal(whole[1], small[1])
    assert small[3] <= whole[3]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_model_ranks_as_its_distribution_does(cell: str) -> None:
    torch.manual_seed(1)
    model = LightRNN(WordTable.random(200), 8, cell=cell, layers=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)
    state = model.log_prob(torch.randint(200, (6, 5)))[1]
    best = model.distribution(state).topk(12)
    words, log_probs = model.next_words(state, 12)
    torch.testing.assert_close(log_probs, best.values)
    assert torch.equal(words, best.indices)
    assert bool((model.rank(state, 1).rows < model.table.rows).any())
