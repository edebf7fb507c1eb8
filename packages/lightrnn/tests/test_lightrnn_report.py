# SPDX-License-Identifier: Apache-2.0
"""What a report tells of a table and of rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import DataError
from paceline_lightrnn import report
from paceline_lightrnn.building import build, first_table, read_vectors
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.settings import Shape
from paceline_lightrnn.table import WordTable
from paceline_lightrnn.vocabulary import Vocabulary

WORDS = Vocabulary(["</s>", "<unk>", "a", "b", "c", "d", "e"], [9, 0, 8, 7, 3, 2, 1])


def test_rows_that_come_most_often_with_their_words() -> None:
    table = WordTable(torch.tensor([0, 1, 2, 3, 4, 5, 6]), 3, 3)  # the last two cells are empty
    assert report.lines_of(table, WORDS, "row", lines=2, words=2) == [(0, 17, ["</s>", "a"]), (1, 12, ["b", "c"])]
    found = report.lines_of(table, WORDS, "column")
    assert [(line, count) for line, count, _ in found] == [(0, 17), (2, 10), (1, 3)]


def test_the_picture_of_a_table() -> None:
    picture = report.heat(WordTable(torch.tensor([0, 1, 2, 3, 4, 5, 6]), 3, 3), WORDS)
    assert picture.shape == (3, 3) and int(np.isnan(picture).sum()) == 2
    assert picture[0, 0] == pytest.approx(np.log10(9))
    folded = report.heat(WordTable.random(1000), Vocabulary(["</s>", "<unk>", *map(str, range(998))], [4] * 1000), 10)
    assert folded.shape == (10, 10) and np.allclose(folded, np.log10(4))


def test_what_a_reader_has_to_know() -> None:
    good = [{"round": 1, "perplexity": 9.0, "cost_before": 3.0, "cost_after": 2.0}, {"round": 2, "perplexity": 8.0}]
    assert report.falls(good) == []
    bad = [{"round": 1, "perplexity": 8.0, "cost_before": 3.0, "cost_after": 3.0}, {"round": 2, "perplexity": 9.0}]
    assert len(report.falls(bad)) == 2


def test_sizes_against_the_full_softmax() -> None:
    model = build(Shape(dimension=4), WORDS)
    trained = report.Trained(model, WORDS, [], 1, "bmuf()")
    assert trained.full.vectors == 4 * (2 * 7 * 4 + 7)
    assert trained.sizes.recurrent == trained.full.recurrent == 4 * sum(p.numel() for p in model.recurrent.parameters())
    assert trained.sizes.vectors == 4 * (2 * (3 + 3) * 4 + 6)


def test_samples_are_words() -> None:
    model = build(Shape(dimension=4), WORDS)
    found = report.samples(model, WORDS, 2, 5)
    assert len(found) == 2 and all(word in WORDS for text in found for word in text.split())
    assert found == report.samples(model, WORDS, 2, 5)


def test_first_tables() -> None:
    assert first_table("random", WORDS, 1) == WordTable.random(7, seed=1)
    assert first_table("frequency", WORDS) == WordTable.by_frequency(torch.from_numpy(WORDS.counts))


def test_vectors_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("3 2\na 1 0\nb 0 1\nother 5 5\n")
    vectors = read_vectors(path, WORDS)
    assert vectors[2:5].tolist() == [[1, 0], [0, 1], [0.5, 0.5]]
    model = build(Shape(dimension=4, table=str(path)), WORDS)
    assert isinstance(model, LightRNN) and model.table.row[2] != model.table.row[3]
    for wrong, what in (("x 1 2\n", "none of the"), ("a 1\nb 1 2\n", "vectors of"), ("a b c\n", "line 1 of")):
        path.write_text(wrong)
        with pytest.raises(DataError, match=what):
            read_vectors(path, WORDS)
