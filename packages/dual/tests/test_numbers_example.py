# SPDX-License-Identifier: Apache-2.0
"""The translators of numbers: what they are given, and that a short training runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[3] / "examples" / "dual_numbers"

if not EXAMPLE.is_dir():
    pytest.skip("the examples are not beside the package", allow_module_level=True)
pytest.importorskip("num2words")


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("dual_numbers_train", EXAMPLE / "train.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    yield program


def test_no_number_is_in_two_parts(example: ModuleType) -> None:
    parts = example.parts(70)
    assert [len(part) for part in parts[:2]] == [example.HELD_OUT, 70]
    assert sorted(number for part in parts for number in part) == list(range(example.HIGHEST + 1))
    assert example.parts(70) == parts


@pytest.mark.parametrize("language", ["en", "fr"])
def test_the_vocabulary_has_every_word_of_every_number(example: ModuleType, language: str) -> None:
    words = set(example.vocabulary(language))
    numbers = [example.written(number, language) for number in range(example.HIGHEST + 1)]
    assert {word for number in numbers for word in number} == words
    assert max(map(len, numbers)) <= example.LONGEST


def test_both_sides_of_a_pair_are_the_same_number(example: ModuleType) -> None:
    words = [example.vocabulary(language) for language in example.LANGUAGES]
    english, french = (
        example.encoded([81], language, known) for language, known in zip(("en", "fr"), words, strict=True)
    )
    assert [words[0][symbol] for symbol in english[0]] == ["eighty", "one"]
    assert [words[1][symbol] for symbol in french[0]] == ["quatre", "vingt", "un"]


@pytest.mark.slow
def test_a_short_training_leaves_what_the_report_reads(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--warm", "1", "--steps", "1", "--prior-steps", "1", "--dimension", "16", "--method", "supervised"]
    monkeypatch.setattr(sys, "argv", ["train.py", *small, "--out", str(tmp_path)])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    example.main()
    assert "French to English" in capsys.readouterr().out
    assert {"history.json", "words.json", "model"} <= {path.name for path in (tmp_path / "supervised").iterdir()}
