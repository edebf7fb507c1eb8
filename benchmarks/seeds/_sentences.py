# SPDX-License-Identifier: Apache-2.0
"""Corpora of the sentences of `_numbers.py`: pairs with labels, held-out ones, and sentences of each side alone.

Labelled, held-out and test sentences are written carefully, in one style. The unlabelled ones are other sentences, and
are written as people do: in several styles (with and without "and", with hyphens, month first, Belgian numbers, ...)
and with typing errors. `Text` changes that.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import random
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from _numbers import FLAGS, PIECE, Item, Style, Vocabulary, both, draw, english, french, vocabularies

LONGEST = 18
"""Words of a carefully written sentence, in either language."""
LONGEST_NOISY = 40
"""Symbols of an unlabelled sentence: a mistyped word is as many as it has letters, and two marks."""
PARTS = ("labelled", "dev", "test", "english", "french")
STYLE, TYPO = 0.15, 0.02
"""Of unlabelled sentences, if nothing else is said: see `Text`."""


@dataclass(frozen=True)
class Sizes:
    """Sentences of each kind; `labelled` are pairs, and `unlabelled` are of each side."""

    labelled: int = 20_000
    unlabelled: int = 18_000
    dev: int = 1_000
    test: int = 2_000


@dataclass(frozen=True)
class Text:
    """How sentences are drawn and written.

    Attributes:
        style: probability of each free choice of style in an unlabelled sentence that departs from the careful one.
        typo: probability that a word of an unlabelled sentence is mistyped.
        free: as `style`, of labelled, held-out and test sentences; drawn for each side by itself, so that a sentence
            does not say how its partner is written.
        prefers: how many times as likely a verb's own `PREFERRED` nouns are.
        least: times that each word is in the labelled sentences, about; those with rarer words are not drawn.
        of: labelled sentences in which words are counted.
    """

    style: float = STYLE
    typo: float = TYPO
    free: float = 0.0
    prefers: float = 1.0
    least: int = 0
    of: int = 500


@dataclass(frozen=True)
class Corpus:
    """Everything that is drawn: pairs of (English, French), and sentences of each side that have no partner."""

    labelled: list[tuple[str, str]]
    dev: list[tuple[str, str]]
    test: list[tuple[str, str]]
    english: list[str]
    french: list[str]
    english_words: Vocabulary
    french_words: Vocabulary


def make(sizes: Sizes | None = None, seed: int = 0, text: Text | None = None) -> Corpus:
    """Draw a corpus: no two of its sentences mean the same, so nothing labelled or held out is among the unlabelled."""
    sizes, text = sizes or Sizes(), text or Text()
    rng = random.Random(f"numbers {seed}")
    wanted = (sizes.test, sizes.dev, sizes.labelled, sizes.unlabelled, sizes.unlabelled)
    items = _distinct(rng, sum(wanted), text)
    ends = [sum(wanted[: place + 1]) for place in range(len(wanted))]
    test, dev, labelled, english, french = (
        items[end - size : end] for end, size in zip(ends, wanted, strict=True)
    )  # held-out first, so that they stay the same whatever the other sizes are
    words = vocabularies()
    return Corpus(
        labelled=[_pair(item, rng, text) for item in labelled],
        dev=[_pair(item, rng, text) for item in dev],
        test=[_pair(item, rng, text) for item in test],
        english=[_noisy(item, rng, 0, words[0], text) for item in english],
        french=[_noisy(item, rng, 1, words[1], text) for item in french],
        english_words=words[0],
        french_words=words[1],
    )


def kept(path: Path, sizes: Sizes, text: Text) -> Corpus:
    """The corpus of a file, which is written where it is missing: rare words make it take half a minute."""
    words = vocabularies()
    asked = {"sizes": asdict(sizes), "text": asdict(text)}
    if not path.exists():
        made = make(sizes, text=text)
        parts = {name: getattr(made, name) for name in PARTS}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({**asked, **parts}, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.replace(path)  # several workers may make it at once
        return made
    found = json.loads(path.read_text(encoding="utf-8"))
    if {name: found[name] for name in asked} != asked:
        raise SystemExit(f"{path} has other sentences than those asked for: give another --out")
    pairs = {name: [(english, french) for english, french in found[name]] for name in PARTS[:3]}
    return Corpus(
        **pairs, english=found["english"], french=found["french"], english_words=words[0], french_words=words[1]
    )


def _pair(item: Item, rng: random.Random, text: Text) -> tuple[str, str]:
    """The item in both languages, each in a style of its own."""
    if not text.free:
        return both(item)
    styles = [_drawn(rng, text.free) for _ in range(2)]
    return english(item, styles[0]), french(item, styles[1])


def _drawn(rng: random.Random, chance: float) -> Style:
    return Style(*(rng.random() < chance for _ in range(10)))


def entropy(text: Text, count: int = 100) -> tuple[float, float]:
    """Of a sentence in English, and in French, given what it means; nats, mean over sentences, of `text.free`."""
    rng = random.Random("entropy")
    found = [0.0, 0.0]
    for item in _distinct(rng, count, text):
        for side, flags in enumerate(FLAGS):
            chances = defaultdict[str, float](float)
            for chosen in itertools.product((False, True), repeat=len(flags)):
                style = Style(**dict(zip(flags, chosen, strict=True)))
                chance = math.prod(text.free if one else 1 - text.free for one in chosen)
                chances[both(item, style)[side]] += chance
            found[side] -= sum(p * math.log(p) for p in chances.values() if p) / count
    return found[0], found[1]


@functools.cache
def frequent(text: Text, at_once: int = 3_000) -> frozenset[str]:
    """Words of both languages that are expected `text.least` times, and half as often again, in `text.of` sentences.

    The rarest word and its sentences are left out, one word after another: others are rarer, or more frequent, then.
    """
    rng = random.Random("frequent")
    left = [frozenset(PIECE.findall(" ".join(both(draw(rng, text.prefers))))) for _ in range(at_once)]
    while left:
        counts = Counter(word for words in left for word in words)
        rarest, count = min(counts.items(), key=lambda item: (item[1], item[0]))
        if count * text.of >= 1.5 * text.least * len(left):
            return frozenset(counts)
        left = [words for words in left if rarest not in words]
    raise SystemExit(f"no word is {text.least} times in {text.of} labelled sentences: give more of them")


def _distinct(rng: random.Random, count: int, text: Text) -> list[Item]:
    """So many items, of which no two are written alike in either language, and none is too long."""
    seen: set[str] = set()
    found: list[Item] = []
    known = frequent(text) if text.least else None
    while len(found) < count:
        item = draw(rng, text.prefers)
        texts = both(item)
        if max(len(PIECE.findall(one)) for one in texts) > LONGEST or not seen.isdisjoint(texts):
            continue
        if known is not None and not known.issuperset(PIECE.findall(" ".join(texts))):
            continue
        seen.update(texts)
        found.append(item)
    return found


def _noisy(item: Item, rng: random.Random, side: int, words: Vocabulary, text: Text) -> str:
    """The item on one side in any style, with typing errors; again if it came out too long."""
    while True:
        style = _drawn(rng, text.style)
        sentence = " ".join(
            mistyped(word, rng) if rng.random() < text.typo else word for word in both(item, style)[side].split()
        )
        if len(words.encode(sentence)) <= LONGEST_NOISY:
            return sentence


def mistyped(word: str, rng: random.Random) -> str:
    """The word with one typing error: a letter left out, doubled, exchanged with the next, or another in its place."""
    if len(word) < 3:
        return word
    place = rng.randrange(len(word) - 1)
    before, letter, after, rest = word[:place], word[place], word[place + 1], word[place + 2 :]
    kinds = (after, letter + letter + after, after + letter, rng.choice("abcdefghijklmnopqrstuvwxyz") + after)
    return before + rng.choice(kinds) + rest
