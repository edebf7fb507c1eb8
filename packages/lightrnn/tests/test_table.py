# SPDX-License-Identifier: Apache-2.0
"""Word tables: every word one cell, whatever the table was built from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline import CheckpointError, MismatchError
from paceline_lightrnn.table import EMPTY, WordTable


@pytest.mark.parametrize(("words", "rows", "columns"), [(1, 1, 1), (2, 1, 2), (5, 2, 3), (9, 3, 3), (10, 3, 4)])
def test_the_smallest_table_that_is_nearly_square(words: int, rows: int, columns: int) -> None:
    table = WordTable.random(words)
    assert table.shape == (rows, columns)
    assert table.full == (words == rows * columns)
    assert int((table.word == EMPTY).sum()) == rows * columns - words
    assert torch.equal(table.word[table.row, table.column], torch.arange(words))


def test_random_tables_follow_their_seed() -> None:
    assert WordTable.random(50, seed=1) == WordTable.random(50, seed=1)
    assert WordTable.random(50, seed=1) != WordTable.random(50, seed=2)


def test_by_frequency_the_most_frequent_share_the_first_row() -> None:
    table = WordTable.by_frequency(torch.tensor([1, 9, 5, 7, 5]))
    assert table.word.tolist() == [[1, 3, 2], [4, 0, EMPTY]]


def test_words_of_near_vectors_share_a_row() -> None:
    groups = torch.arange(16) % 4
    vectors = 100.0 * groups[:, None] * torch.tensor([1.0, 0.0]) + torch.arange(16)[:, None] * torch.tensor([0.0, 1.0])
    table = WordTable.from_vectors(vectors)
    for row in table.word:
        assert len({int(groups[word]) for word in row}) == 1
    assert [len({int(word) // 4 for word in column}) for column in table.word.T] == [1, 1, 1, 1]


def test_a_table_is_the_same_when_it_comes_back(tmp_path: Path) -> None:
    table = WordTable.random(11, columns=5)
    table.save(tmp_path / "table.safetensors")
    assert WordTable.load(tmp_path / "table.safetensors") == table
    assert [path.name for path in tmp_path.iterdir()] == ["table.safetensors"]


@pytest.mark.parametrize(
    ("cells", "shape", "message"),
    [
        ([0, 0], (1, 2), "two words share one"),
        ([0, 2], (1, 2), "cells are 0 to 1, got 0 to 2"),
        ([0, 1, 2], (1, 2), r"3 words do not fit into 1 rows x 2 columns; \(2, 2\) would do"),
        ([], (1, 2), "one cell for each word"),
    ],
)
def test_wrong_cells_are_refused(cells: list[int], shape: tuple[int, int], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        WordTable(torch.tensor(cells), *shape)


def test_what_is_no_table_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    with pytest.raises(CheckpointError, match=r"table\.safetensors"):
        WordTable.load(path)
    path.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"table\.safetensors"):
        WordTable.load(path)
    save_file({"cells": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="no word table"):
        WordTable.load(path)
    save_file({"cells": torch.zeros(2)}, path, {"format": "paceline word table 1", "rows": "1", "columns": "2"})
    with pytest.raises(CheckpointError, match="two words share one"):
        WordTable.load(path)
