# SPDX-License-Identifier: Apache-2.0
"""Words and their numbers: counted in bounded memory, saved, and refused when damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import CheckpointError, DataError, MismatchError
from paceline_lightrnn.text import Line
from paceline_lightrnn.vocabulary import END, UNKNOWN, Vocabulary

LINES: list[Line] = [(["the", "cat", "and", "the", "dog"], True), (["the", "end"], False), (["cat"], True)]


def test_numbers_go_by_frequency_and_every_word_is_counted_once() -> None:
    words = Vocabulary.count(LINES)
    assert words.words == [END, UNKNOWN, "the", "cat", "and", "dog", "end"]
    assert words.counts.tolist() == [2, 0, 3, 2, 1, 1, 1]
    assert words["cat"] == 3 and words["bird"] == words.unknown == 1 and "bird" not in words
    assert words.ids(["the", "bird"]) == [2, 1, 0] and words.ids(["the"], ended=False) == [2]
    assert words.text([2, 3, 0, 5]) == "the cat\ndog"


def test_the_most_frequent_and_those_that_come_often_enough() -> None:
    few = Vocabulary.count(LINES, most=4)
    assert few.words == [END, UNKNOWN, "the", "cat"] and few.counts.tolist() == [2, 3, 3, 2]
    assert Vocabulary.count(LINES, min_count=3).words == [END, UNKNOWN, "the"]
    assert Vocabulary.count(LINES, most=100).words == Vocabulary.count(LINES).words


def test_words_of_a_cut_text_that_mean_the_end_and_the_unknown() -> None:
    words = Vocabulary.count([(["a", "</s>", "<unk>", "a"], False)])
    assert words.words == [END, UNKNOWN, "a"] and words.counts.tolist() == [1, 1, 2]
    assert words.ids(["</s>", "<unk>"], ended=False) == [0, 1]


def test_memory_is_bounded_and_what_is_lost_is_said() -> None:
    def text() -> Iterator[Line]:
        for number in range(3000):
            yield [f"rare{number}", "often", "often"], True

    words = Vocabulary.count(text(), limit=100, min_count=2)
    assert words.words == [END, UNKNOWN, "often"]
    assert 6000 - words.lost <= words.counts[2] <= 6000 and words.lost > 0
    assert Vocabulary.count(text(), min_count=2).lost == 0


def test_a_text_without_words_and_wishes_that_cannot_be() -> None:
    with pytest.raises(DataError, match="no word in the text"):
        Vocabulary.count([([], True)])
    with pytest.raises(DataError, match="most frequent 3"):
        Vocabulary.count(LINES, min_count=4)
    with pytest.raises(DataError, match="room for 2"):
        Vocabulary.count(LINES, most=2)
    with pytest.raises(MismatchError, match="'a' comes twice"):
        Vocabulary([END, UNKNOWN, "a", "a"], [1, 1, 1, 1])
    with pytest.raises(MismatchError, match="white space"):
        Vocabulary([END, UNKNOWN, "a b"], [1, 1, 1])
    with pytest.raises(MismatchError, match="3 words have 2 counts"):
        Vocabulary([END, UNKNOWN, "a"], [1, 1])
    with pytest.raises(MismatchError, match="first two"):
        Vocabulary(["a", "b"], [1, 1])


def test_saved_and_read_back(tmp_path: Path) -> None:
    words = Vocabulary.count([(["naïve", "#", '"', "7"], True)], tokens="space", lower=True)
    words.save(tmp_path / "v.tsv")
    again = Vocabulary.load(tmp_path / "v.tsv")
    assert again.words == words.words and again.counts.tolist() == words.counts.tolist()
    assert (again.tokens, again.lower, again.lost) == ("space", True, 0)
    assert again.fingerprint == words.fingerprint != Vocabulary.count(LINES).fingerprint


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.tsv"
    Vocabulary.count(LINES).save(path)
    whole = path.read_bytes()
    for damaged in (whole[:-3], whole.replace(b"cat", b"rat"), b"", b"{}\n", b'{"format": "x"}\nw\t1\n', b"\xff\n"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"v.tsv"):
            Vocabulary.load(path)
    with pytest.raises(CheckpointError, match="cannot read"):
        Vocabulary.load(tmp_path / "missing.tsv")
