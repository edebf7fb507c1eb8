# SPDX-License-Identifier: Apache-2.0
"""A text is prepared once, used again, and waited for by the other workers."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import CheckpointError, DataError, PeerLostError, UnsupportedError
from paceline_lightrnn.preparing import VOCABULARY, await_prepared, is_prepared, prepare
from paceline_lightrnn.settings import Course, Settings, Shape, Source


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "a.txt").write_text("one two three two\n" * 10)
    return Source((str(tmp_path / "a.txt"),), held_back=0.2)


def test_prepared_once_and_used_again(source: Source, tmp_path: Path) -> None:
    folder, said = tmp_path / "out", []
    assert not is_prepared(folder)
    data = prepare(source, folder, say=said.append)
    assert is_prepared(folder) and said and (len(data.train), len(data.validation)) == (40, 10)
    assert data.vocabulary.text(data.validation.ids.tolist()) == "one two three two\n" * 1 + "one two three two \n"
    said.clear()
    again = prepare(source, folder, fixed=True, say=said.append)
    assert not said and again.vocabulary.words == data.vocabulary.words


def test_another_text_or_damage_makes_it_anew_unless_a_training_has_begun(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    prepare(source, folder)
    (folder / VOCABULARY).write_text("damaged")
    assert prepare(source, folder).vocabulary["three"] > 1
    (tmp_path / "a.txt").write_text("four five\n" * 10)
    with pytest.raises(CheckpointError, match="the text has changed"):
        prepare(source, folder, fixed=True)
    assert "four" in prepare(source, folder).vocabulary


def test_a_validation_text_of_its_own(source: Source, tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("two new\n")
    data = prepare(replace(source, validation=str(tmp_path / "v.txt")), tmp_path / "out")
    assert len(data.train) == 50 and data.validation.ids.tolist() == [data.vocabulary["two"], 1, 0]


def test_a_vocabulary_with_more_room_than_words_is_told(source: Source, tmp_path: Path) -> None:
    said: list[str] = []
    prepare(replace(source, vocabulary=1000), tmp_path / "out", say=said.append)
    assert any("fewer different words than the 1,000" in text for text in said)


def test_the_others_wait_for_worker_0(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(PeerLostError, match=r"for 0\.2 s.*all workers share"):
        await_prepared(source, folder, 0.2)
    thread = threading.Thread(target=prepare, args=(source, folder))
    thread.start()
    found = await_prepared(source, folder, 60)
    thread.join()
    assert len(found.train) == 40


def test_a_text_too_short_to_hold_something_back(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="too short"):
        prepare(Source((str(tmp_path / "a.txt"),), tokens="space", held_back=0.9), tmp_path / "out")


def test_settings_are_kept_and_differences_named(source: Source, tmp_path: Path) -> None:
    mine = Settings(Shape(dimension=8), Course(rounds=2), source)
    mine.save(tmp_path / "s.json")
    assert Settings.load(tmp_path / "s.json") == mine
    mine.check(mine, tmp_path)
    other = Settings(Shape(dimension=9), Course(rounds=2, seed=5), source)
    with pytest.raises(CheckpointError, match="dimension is 9 now and was 8; seed is 5 now and was 0"):
        other.check(mine, tmp_path)
    for damaged in ("{}", "[]", '{"format": "x"}', "{"):
        (tmp_path / "s.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"s\.json"):
            Settings.load(tmp_path / "s.json")
    for wrong in ({"rounds": 0}, {"optimizer": "x"}, {"costs": "x"}, {"clip": 0.0}, {"rate": -1.0}):
        with pytest.raises(UnsupportedError):
            Course(**wrong)  # type: ignore[arg-type]
