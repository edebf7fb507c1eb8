# SPDX-License-Identifier: Apache-2.0
"""Teach two translators, English to French and back, with few pairs and many sentences that have no partner.

The sentences are numbers in words, which num2words (`pip install num2words`) writes in both languages. Of a few
numbers both are given; of others only the English or only the French::

    python train.py                                                          # one worker
    paceline run --workers 4 --rule "bmuf_adam(period=8)" train.py           # four
    paceline dual watch out/dual_numbers/dual                                # while it runs, in another terminal
    paceline dual report out/dual_numbers/dual                               # a page with translations

`--method supervised` does as many steps with the pairs alone, `--method back_translation` with pseudo-labels.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline_dual import (
    METHODS,
    Course,
    Data,
    LanguageModel,
    Looks,
    Loop,
    Mix,
    Pair,
    PriorCourse,
    Rates,
    Reward,
    Seq2Seq,
    Words,
    pad,
    shown,
    train,
    train_prior,
)

LANGUAGES = "en", "fr"
HIGHEST = 9_999
LONGEST = 20  # words of a number; "neuf mille neuf cent quatre vingt dix neuf" has eight
HELD_OUT = 500


def written(number: int, language: str) -> list[str]:
    """The number in words, without hyphens and commas."""
    try:
        from num2words import num2words
    except ImportError:
        sys.exit("train.py: it takes num2words to write numbers; pip install num2words")
    return str(num2words(number, lang=language)).replace("-", " ").replace(",", "").split()


def vocabulary(language: str) -> list[str]:
    """All words that numbers are made of."""
    numbers = [*range(101), *range(100, HIGHEST, 100), *range(1_001, 1_100)]
    return sorted({word for number in numbers for word in written(number, language)})


def parts(pairs: int, seed: int = 0) -> tuple[list[int], list[int], list[int], list[int]]:
    """Numbers that are held out, given in both languages, in English only, in French only; none is in two parts."""
    numbers = list(range(HIGHEST + 1))
    random.Random(seed).shuffle(numbers)
    rest = numbers[HELD_OUT + pairs :]
    return numbers[:HELD_OUT], numbers[HELD_OUT : HELD_OUT + pairs], rest[::2], rest[1::2]


def encoded(numbers: Sequence[int], language: str, words: Sequence[str]) -> torch.Tensor:
    """Numbers in words, as symbols [B, T]."""
    known = {word: symbol for symbol, word in enumerate(words)}
    return pad([[known[word] for word in written(number, language)] for number in numbers])


def data_of(pairs: int, words: Sequence[Sequence[str]]) -> Data:
    """What is trained on, and what is held out; x is English, y French."""
    held_out, labelled, english, french = parts(pairs)
    both = [
        tuple(encoded(part, language, known) for language, known in zip(LANGUAGES, words, strict=True))
        for part in (labelled, held_out)
    ]
    (x, y), (held_out_x, held_out_y) = both
    return Data((x, y), (held_out_x, held_out_y), encoded(english, "en", words[0]), encoded(french, "fr", words[1]))


def pair_of(words: Sequence[Sequence[str]], data: Data, dimension: int, prior_steps: int, rule: str | None) -> Pair:
    """Two translators, and two language models that are trained first."""
    x, y = map(len, words)
    shape = {"dimension": dimension, "layers": 2, "longest": LONGEST}
    priors = LanguageModel(x, **shape), LanguageModel(y, **shape)
    for prior, samples in zip(priors, (data.x, data.y), strict=True):
        assert samples is not None
        train_prior(prior, samples, PriorCourse(prior_steps, rate=3e-3), rule=rule)
    return Pair(Seq2Seq(x, y, **shape), Seq2Seq(y, x, **shape), *priors)


def course_of(args: argparse.Namespace) -> Course:
    return Course(
        args.warm,
        args.steps,
        args.method,
        mix=Mix(labelled=32, unlabelled=32),
        reward=Reward(alpha=0.01, samples=2),
        loop=Loop(
            rates=Rates(warm=3e-3, forward=1e-3, backward=1e-3),
            looks=Looks(every=max(1, args.steps // 5)),
            seed=args.seed,
        ),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train two translators of numbers.")
    parser.add_argument("--rule", help='such as "bmuf_adam(period=8)"; default: that of `paceline run`')
    parser.add_argument("--method", choices=METHODS, default="dual")
    parser.add_argument("--pairs", type=int, default=100, help="numbers that are given in both languages")
    parser.add_argument("--warm", type=int, default=400, help="steps with the pairs alone")
    parser.add_argument("--steps", type=int, default=400, help="of the method")
    parser.add_argument("--prior-steps", type=int, default=200)
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/dual_numbers"))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # models this small gain nothing from a second core
    torch.manual_seed(args.seed)
    words = [vocabulary(language) for language in LANGUAGES]
    data = data_of(args.pairs, words)
    pair = pair_of(words, data, args.dimension, args.prior_steps, args.rule)
    folder = args.out / args.method
    with shown() as show:
        names = Words(*map(tuple, words))
        history = train(pair, data, course_of(args), folder, rule=args.rule, words=names, show=show)
    last, warm = history[-1], next(row for row in history if row["step"] == args.warm)
    for name, what in (("exact_forward", "English to French"), ("exact_backward", "French to English")):
        print(f"{what}: {100 * warm[name]:.1f} % right after the warm-up, {100 * last[name]:.1f} % at the end")


if __name__ == "__main__":
    main()
