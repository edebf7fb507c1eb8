# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of dual learning draw and count: sentences, sounds, and sentiment in what is written."""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from paceline_dual import LabelToText, pad, unpad

FOLDER = Path(__file__).parents[3] / "benchmarks"
NAMES = ("_numbers", "_sentences", "_sounds", "_reviews", "_review_writing")

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


def test_a_sound_is_normal_about_what_the_letters_say(modules: dict[str, ModuleType]) -> None:
    sounds = modules["_sounds"]
    torch.manual_seed(0)
    says = sounds.Says(5, 8, 1, 0.0).eval()
    says.logarithms.data.uniform_(-0.3, 1)
    letters, sound = pad([[0, 1], [2]]), torch.randn(2, 5)
    right = torch.distributions.Normal(says.mean(letters), says.spread.exp()).log_prob(sound).sum(1)
    torch.testing.assert_close(says.log_prob(sound, letters), right)
    best, log_probs = says.beam(letters, 2)
    torch.testing.assert_close(best[:, 0], says.mean(letters))
    assert bool((log_probs[:, 0] >= right).all()) and bool(log_probs[:, 1].isneginf().all())


def test_the_beam_of_what_is_heard_has_its_own_probabilities(modules: dict[str, ModuleType]) -> None:
    sounds = modules["_sounds"]
    torch.manual_seed(0)
    hears = sounds.Hears(5, 8, 1, 0.0).eval()
    sound = torch.randn(2, 5)
    best, log_probs = hears.beam(sound, 3)
    again = hears.log_prob(best.flatten(0, 1), sound.repeat_interleave(3, 0))
    torch.testing.assert_close(again.view(2, 3), log_probs)


def test_sentiment_is_counted_for_and_against_the_label(modules: dict[str, ModuleType]) -> None:
    part = pad([[1, 1, 3], [2, 2, 3]]), torch.tensor([1, 0])  # "good good film", "bad bad film"
    reviews = modules["_reviews"].Reviews(part, part, part, ("<rare>", "good", "bad", "film"))
    judge = modules["_review_writing"].Judge(reviews, {"good": 1.9, "bad": -2.5, "film": 0.1})
    figures = judge.figures(pad([[1, 3, 0], [1, 2, 3, 3]]), torch.tensor([1, 0]))
    counted = {"sentiment": 3 / 6, "agreeing": 2 / 6, "opposing": 1 / 6, "words_of_a_text": 3.0}
    assert {name: figures[name] for name in counted} == pytest.approx(counted)
    assert judge.figures(*part)["read_right"] == 1.0


def test_cold_writing_is_greedy_and_has_no_rare_word(modules: dict[str, ModuleType]) -> None:
    torch.manual_seed(0)
    empty = torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    reviews = modules["_reviews"].Reviews(empty, empty, empty, ("<rare>", *"abcdef"))
    writer = LabelToText(7, 2, 8, 1, 2, 0.0, 6)
    before = {name: value.clone() for name, value in writer.state_dict().items()}
    texts, labels = modules["_review_writing"].write(writer, reviews, 3, 1e-4, 0)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    rows = unpad(texts)
    assert rows[0] == rows[1] == rows[2] and rows[3] == rows[4] == rows[5]
    assert not any(0 in row for row in rows)
    assert all(bool((value == before[name]).all()) for name, value in writer.state_dict().items())
