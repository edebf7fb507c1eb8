# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of dual learning draws: sentences."""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
NAMES = ("_numbers", "_sentences")

if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not beside the package", allow_module_level=True)
pytest.importorskip("num2words")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Modules of the benchmarks, which go out of sight again."""
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("seeds", "common"):
            patch.syspath_prepend(str(FOLDER / folder))
        yield {name: importlib.import_module(name) for name in NAMES}
    for name in set(sys.modules) - known:
        if name.startswith("_"):
            del sys.modules[name]


def test_no_sentence_has_a_word_that_is_rarely_labelled(modules: dict[str, ModuleType]) -> None:
    numbers, sentences = modules["_numbers"], modules["_sentences"]
    text = sentences.Text(style=0.0, typo=0.0, prefers=8.0, least=14, of=200)
    corpus = sentences.make(sentences.Sizes(200, 10, 10, 10), text=text)
    labelled = [Counter(words) for words in zip(*corpus.labelled, strict=True)]
    counts = [Counter(word for text in side for word in set(numbers.PIECE.findall(text))) for side in labelled]
    assert min(min(count.values()) for count in counts) >= 7  # 21 are expected of each, at least
    for side, alone in enumerate((corpus.english, corpus.french)):
        held_out = [pair[side] for pair in corpus.dev + corpus.test]
        assert {word for text in alone + held_out for word in numbers.PIECE.findall(text)} <= set(counts[side])


def test_a_verb_prefers_its_nouns_as_often_as_asked(modules: dict[str, ModuleType]) -> None:
    numbers = modules["_numbers"]
    found = Counter[bool]()
    dice = numbers.random.Random(0)
    for _ in range(4_000):
        item = numbers.draw(dice, 1e9)
        if item.noun is not None:
            found[item.noun in numbers.preferred(item.verb)] += 1
    assert found[True] > 0 and not found[False]


def test_what_a_sentence_says_has_as_much_entropy_as_its_free_choices(modules: dict[str, ModuleType]) -> None:
    numbers, sentences = modules["_numbers"], modules["_sentences"]
    assert sentences.entropy(sentences.Text(free=0.0), 5) == (0.0, 0.0)
    item = numbers.Item(0, False, 101, 0, None, None, None)  # "one hundred and one books": "and", and "a" hundred
    ways = {numbers.english(item, numbers.Style(no_and=a, a_hundred=b)) for a in (0, 1) for b in (0, 1)}
    assert len(ways) == 4
    english, _ = sentences.entropy(sentences.Text(free=0.5), 40)
    assert 0 < english < 4 * math.log(2)


def test_a_kept_corpus_is_the_one_that_was_made_and_no_other(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    sentences = modules["_sentences"]
    sizes, text = sentences.Sizes(5, 5, 2, 2), sentences.Text(free=0.5)
    made = sentences.kept(tmp_path / "corpus.json", sizes, text)
    assert sentences.kept(tmp_path / "corpus.json", sizes, text) == made
    with pytest.raises(SystemExit, match="other sentences"):
        sentences.kept(tmp_path / "corpus.json", sizes, sentences.Text())
