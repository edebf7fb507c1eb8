# SPDX-License-Identifier: Apache-2.0
"""A text on disk as numbers, and the passages and lanes in which it is read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import DataError
from paceline_lightrnn.corpus import Corpus, Passages, lanes
from paceline_lightrnn.state import PADDING
from paceline_lightrnn.text import Text
from paceline_lightrnn.vocabulary import Vocabulary


@pytest.fixture
def text(tmp_path: Path) -> Text:
    (tmp_path / "a.txt").write_text("a b a\nc a\n")
    return Text([tmp_path / "a.txt"])


def numbers(n: int) -> Corpus:
    return Corpus(np.arange(n, dtype=np.int32))


def test_written_as_a_stream_and_mapped(text: Text, tmp_path: Path) -> None:
    words = Vocabulary.count(text)
    corpus = Corpus.write(text, words, tmp_path / "deep" / "ids")
    assert isinstance(corpus.ids, np.memmap)
    assert words.text(corpus.ids.tolist()) == "a b a\nc a \n"
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["ids", "ids.json"]


def test_used_again_only_for_the_same_text_and_vocabulary(text: Text, tmp_path: Path) -> None:
    words, path = Vocabulary.count(text), tmp_path / "ids"
    first = Corpus.ensure(text, words, path)
    made = path.stat().st_mtime_ns, path.stat().st_ino
    assert Corpus.ensure(text, words, path).fingerprint == first.fingerprint
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == made
    fewer = Corpus.ensure(text, Vocabulary.count(text, most=3), path)
    assert fewer.ids.tolist() == [2, 1, 2, 0, 1, 2, 0]
    text.files[0].write_text("c c c\n")
    os.utime(text.files[0], ns=(1, 1))
    assert Corpus.ensure(text, words, path).ids.tolist() == [4, 4, 4, 0]


def test_a_damaged_corpus_is_refused_and_made_again(text: Text, tmp_path: Path) -> None:
    words, path = Vocabulary.count(text), tmp_path / "ids"
    whole = Corpus.write(text, words, path).ids.tolist()
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="26 bytes for 7 words"):
        Corpus.open(path)
    assert Corpus.ensure(text, words, path).ids.tolist() == whole
    path.with_name("ids.json").write_text("{}")
    with pytest.raises(DataError, match="remove it"):
        Corpus.open(path)
    with pytest.raises(DataError, match="cannot read the corpus"):
        Corpus.open(tmp_path / "other")


def test_an_empty_text_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(DataError, match="no word"):
        Corpus.write(Text([tmp_path / "empty.txt"]), Vocabulary.count([(["a"], True)]), tmp_path / "ids")
    assert [p.name for p in tmp_path.iterdir()] == ["empty.txt"]


def test_the_last_part_is_held_back() -> None:
    train, last = numbers(10).split(0.2)
    assert train.ids.tolist() == list(range(8)) and last.ids.tolist() == [8, 9]
    for share in (0.0, 1.0):
        with pytest.raises(DataError, match="between 0 and 1"):
            numbers(10).split(share)
    with pytest.raises(DataError, match="too short"):
        numbers(1).split(0.5)


@pytest.mark.parametrize(("words", "length", "multiple"), [(10, 4, 1), (8, 4, 1), (1, 4, 2), (9, 2, 4), (16, 2, 4)])
def test_every_word_is_in_one_passage(words: int, length: int, multiple: int) -> None:
    passages = Passages(numbers(words), length, multiple)
    assert len(passages) % multiple == 0 and len(passages) - multiple < -(-words // length)
    read = torch.cat([passages[k] for k in range(len(passages))])
    assert read[:words].tolist() == list(range(words)) and bool((read[words:] == PADDING).all())
    with pytest.raises(IndexError):
        passages[len(passages)]


@pytest.mark.parametrize(("words", "number", "window"), [(10, 3, 2), (9, 4, 2), (12, 3, 4), (5, 1, 10), (7, 3, 100)])
def test_lanes_read_every_word_once_and_in_order(words: int, number: int, window: int) -> None:
    whole = torch.cat(list(lanes(numbers(words), number, window)), 1)
    assert whole.shape[0] == number
    assert whole.flatten()[:words].tolist() == list(range(words))
    assert bool((whole.flatten()[words:] == PADDING).all())
    halves = [torch.cat(list(lanes(numbers(words), number, window, (k, 2))), 1) for k in range(2) if k < number]
    assert sorted(torch.cat(halves).flatten().tolist()) == sorted(whole.flatten().tolist())


def test_wrong_passages_are_refused() -> None:
    with pytest.raises(DataError, match="at least 1"):
        Passages(numbers(3), 0)
    with pytest.raises(DataError, match="no words"):
        Passages(numbers(0), 3)
