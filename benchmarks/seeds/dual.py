# SPDX-License-Identifier: Apache-2.0
"""Two translators that teach each other, English to French and back: what unlabelled sentences and duality give.

Sentences full of numbers, dates and times (`_numbers.py`), small Transformers, two language models. A tenth of the
pairs is labelled:

    warm               both translators after the warm-up on the labelled tenth
    longer             and after as many steps more on it as the next ones make
    constrained        the same, with the probabilistic constraint
    back_translation   each learns from what the other one made of unlabelled sentences after the warm-up
    iterative          the same, of what the other one makes of them now
    dual               dual learning from the same sentences

and all of them are:

    full               trained on all pairs, as many steps as the longest of the above
    dual_supervised    the same, with the probabilistic constraint in the second part

Dual inference is tried on the translators of `longer`, `dual` and `full`: its weight comes from the held-out part, the
figures, as all others, from the test part. Right is a sentence that is the reference word for word (best of a beam).

    python benchmarks/seeds/dual.py [--seeds 3] [--jobs 2] [--out out/dual]

One training can be given to several workers, which read together as many samples as one would. The language models, and
for what begins warm the warm pair, have to be in `--out` already:

    paceline run --workers 4 --rule "bmuf(period=8)" benchmarks/seeds/dual.py \
        --one dual 0 --workers 4 --out out/dual_four

Finished trainings in `--out` are kept, so that it goes on where it was stopped. The last line is a JSON object:
`beam_exact` and `beam_bleu` of each method and direction (mean over seeds), `beam_exact_each` and `beam_bleu_each` of
each seed, the same with dual inference (`dual_inference_exact`, ..), and `nats`, -log P of a test sentence in the mean.
`entropy` is that of a sentence in English, and in French, given what it means, in nats: above 0 with `--free`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _numbers
import _quick
import _sentences
import _trainings
import torch
from sacrebleu.metrics import BLEU
from torch import Tensor

from paceline_dual import (
    DIRECTIONS,
    Constraint,
    Course,
    Data,
    Direction,
    DualInference,
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
    exact_match,
    joined,
    pad,
    train,
    train_prior,
    unpad,
)

FIRST = ("warm", "full", "dual_supervised")
AFTER_WARM = ("dual", "back_translation", "iterative", "longer", "constrained")
METHODS = (*FIRST, *AFTER_WARM)
QUICK: dict[str, Any] = {"labelled": 120, "unlabelled": 64, "dev": 16, "test": 16, "dimension": 16, "layers": 1}
QUICK |= {"warm": 40, "rate": 1e-2, "steps": 6, "prior_steps": 4, "least": 0}
QUICK |= {"batch": 8, "unlabelled_batch": 8, "beam": 2, "seeds": 1}
TEST_AT_A_TIME = 250


class Sentences:
    """The corpus as tensors; x is English and y French."""

    def __init__(self, args: argparse.Namespace) -> None:
        sizes = _sentences.Sizes(args.labelled, args.unlabelled, args.dev, args.test)
        text = text_of(args)
        corpus = _sentences.kept(args.out / "corpus.json", sizes, text)
        self.sides = corpus.english_words, corpus.french_words
        self.labelled, self.dev, self.test = (
            self._pairs(pairs) for pairs in (corpus.labelled, corpus.dev, corpus.test)
        )
        self.x = pad([self.sides[0].encode(sentence) for sentence in corpus.english])
        self.y = pad([self.sides[1].encode(sentence) for sentence in corpus.french])
        self.words = Words(*(side.symbols for side in self.sides))

    def _pairs(self, pairs: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        english, french = (pad([side.encode(pair[place]) for pair in pairs]) for place, side in enumerate(self.sides))
        return english, french

    def known(self, args: argparse.Namespace, method: str) -> tuple[Tensor, Tensor]:
        """The labelled pairs that a method sees."""
        count = len(self.labelled[0])
        count = count if method in ("full", "dual_supervised") else round(count * args.share)
        return self.labelled[0][:count], self.labelled[1][:count]


def text_of(args: argparse.Namespace) -> _sentences.Text:
    """How the sentences are drawn and written."""
    known = round(args.labelled * args.share)
    return _sentences.Text(args.style, args.typo, args.free, args.prefers, args.least, known)


# ---- Trainings


def pair_of(args: argparse.Namespace, sentences: Sentences, seed: int) -> Pair:
    """Fresh translators, and the language models that were trained before."""
    torch.manual_seed(seed)
    x, y = (len(side.symbols) for side in sentences.sides)
    shape = (args.dimension, args.layers, 4, args.dropout, _sentences.LONGEST_NOISY)
    priors = (LanguageModel.load(args.out / f"prior-{side}") for side in "xy")
    return Pair(Seq2Seq(x, y, *shape), Seq2Seq(y, x, *shape), *priors)


def priors(args: argparse.Namespace, sentences: Sentences) -> None:
    """Train the language model of each side on its unlabelled sentences, once."""
    for side, words, samples in zip("xy", sentences.sides, (sentences.x, sentences.y), strict=True):
        if (args.out / f"prior-{side}" / "model.json").exists():
            continue
        torch.manual_seed(0)
        size = len(words.symbols)
        model = LanguageModel(size, args.dimension, args.layers, 4, args.dropout, _sentences.LONGEST_NOISY)
        score = train_prior(model, samples, PriorCourse(args.prior_steps, 64, args.rate))
        print(f"prior {side}: log P of a sentence {score:.2f}", flush=True)
        model.save(args.out / f"prior-{side}")


def course_of(args: argparse.Namespace, method: str, seed: int) -> Course:
    """What is trained, and how."""
    before, behind = args.warm // args.workers, args.steps // args.workers
    warm, steps, way = {
        "warm": (before, 0, "supervised"),
        "longer": (0, behind, "supervised"),
        "constrained": (0, behind, "supervised"),
        "back_translation": (0, behind, "back_translation"),
        "iterative": (0, behind, "iterative_back_translation"),
        "dual": (0, behind, "dual"),
    }.get(method, (before, behind, "supervised"))
    weight = args.constraint if method in ("constrained", "dual_supervised") else 0.0
    return Course(
        warm,
        steps,
        way,
        mix=Mix(args.batch, args.unlabelled_batch, args.labelled_from, args.labelled_to, args.policy),
        constraint=Constraint(weight, weight),
        reward=Reward(args.alpha, args.samples, args.baseline, args.per_token, args.search),
        loop=Loop(
            Rates(args.rate, args.second_rate, args.second_rate),
            looks=Looks(every=max(1, behind // 4)),
            save_every=10**9,
            seed=seed,
        ),
    )


def one(args: argparse.Namespace, method: str, seed: int) -> None:
    """Train one pair, and leave what came out."""
    torch.set_num_threads(1)  # other trainings have the other cores
    sentences = Sentences(args)
    pair = pair_of(args, sentences, seed)
    if method in AFTER_WARM:
        pair.load(args.out / f"warm-{seed}" / "model")
    # The looks in the course of a training see a part of the held-out pairs only; they steer nothing.
    heldout = sentences.dev[0][:250], sentences.dev[1][:250]
    data = Data(sentences.known(args, method), heldout, sentences.x, sentences.y)
    course = course_of(args, method, seed)
    history = train(pair, data, course, args.out / f"{method}-{seed}", words=sentences.words)
    if int(os.environ.get("RANK", "0")):
        return  # worker 0 says what came out
    row = {"method": method, "seed": seed, "seconds": history[-1]["seconds"]}
    row |= {name: judged(args, pair.direction(name), sentences) for name in DIRECTIONS}
    _trainings.leave(args.out, (method, seed), row)
    told = ", ".join(f"{name} {row[name]['beam']['exact']:.3f}" for name in DIRECTIONS)
    print(f"{method}, seed {seed}: exact {told}", flush=True)


# ---- Figures


def judged(args: argparse.Namespace, direction: Direction, sentences: Sentences) -> dict[str, Any]:
    """A translator on the test part, alone and with dual inference."""
    place = DIRECTIONS.index(direction.name)
    words = sentences.sides[1 - place]
    both = DualInference(direction.primal, direction.dual, direction.prior_target, beam=args.beam)
    choice = both.tune(batches(sentences.dev, place))
    found = [(both.candidates(x), y) for x, y in batches(sentences.test, place)]
    right = joined([y for _, y in found])
    weights = {"beam": 1.0, "dual_inference": choice.weight}
    answers = {name: joined([candidates.best(a) for candidates, _ in found]) for name, a in weights.items()}
    with torch.no_grad():
        log_probs = torch.cat([direction.primal.log_prob(y, x) for x, y in batches(sentences.test, place)])
    return {
        "weight": choice.weight,
        "tried": choice.tried,
        "nats": -float(log_probs.mean()),
        **{
            name: {"exact": exact_match(answer, right), "bleu": bleu(words, answer, right)}
            for name, answer in answers.items()
        },
    }


def batches(pairs: tuple[Tensor, Tensor], place: int) -> list[tuple[Tensor, Tensor]]:
    """(source, target) of pairs; 0 from English, 1 from French."""
    source, target = pairs if place == 0 else pairs[::-1]
    return list(zip(source.split(TEST_AT_A_TIME), target.split(TEST_AT_A_TIME), strict=True))


def bleu(words: _numbers.Vocabulary, found: Tensor, right: Tensor) -> float:
    """BLEU of sacrebleu over all sentences; their pieces stand apart already."""
    texts = [[words.decode(row) for row in unpad(rows)] for rows in (found, right)]
    return float(BLEU(tokenize="none", force=True).corpus_score(texts[0], [texts[1]]).score)


def all_of_them(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train what is not there yet, `--jobs` at a time: what begins from a warm pair when those are warm."""
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    priors(args, Sentences(args))

    seeds = range(args.seeds)
    waves = [
        [(method, seed) for method in wave if method in args.only for seed in seeds] for wave in (FIRST, AFTER_WARM)
    ]
    if waves[1] and "warm" not in args.only:
        waves.insert(0, [("warm", seed) for seed in seeds])
    for wave in waves:
        _trainings.rows_of(args.out, wave, args.jobs)
    wanted = [(method, seed) for method in METHODS if method in args.only for seed in seeds]
    return _trainings.rows_of(args.out, wanted, args.jobs)


def summary(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The figures, for people on lines of their own and as one JSON object."""
    result: dict[str, Any] = {"share": args.share, "labelled": args.labelled, "seeds": args.seeds}
    result["nats"] = {
        method: {
            name: statistics.mean(row[name]["nats"] for row in rows if row["method"] == method) for name in DIRECTIONS
        }
        for method in METHODS
        if method in args.only
    }
    result["entropy"] = _sentences.entropy(text_of(args))
    for way in ("beam", "dual_inference"):
        for measure in ("exact", "bleu"):
            each = {
                method: {
                    name: [round(row[name][way][measure], 4) for row in rows if row["method"] == method]
                    for name in DIRECTIONS
                }
                for method in METHODS
                if method in args.only
            }
            result[f"{way}_{measure}_each"] = each
            result[f"{way}_{measure}"] = {
                method: {name: round(statistics.mean(found), 4) for name, found in both.items()}
                for method, both in each.items()
            }
    for method, both in result["beam_exact_each"].items():
        told = "  ".join(f"{name} {', '.join(f'{100 * x:5.1f}' for x in found)}" for name, found in both.items())
        also = result["dual_inference_exact"][method]
        inferred = ", ".join(f"{100 * also[name]:.1f}" for name in DIRECTIONS)
        print(f"{method:17} right, %: {told}; mean with dual inference {inferred}")
    return result


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for; `given` in place of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_argument_group("data")
    sizes.add_argument("--labelled", type=int, default=5_000, help="pairs in all")
    sizes.add_argument("--share", type=float, default=0.1, help="of them that is labelled")
    sizes.add_argument("--unlabelled", type=int, default=18_000, help="sentences of each side")
    sizes.add_argument("--dev", type=int, default=1_000)
    sizes.add_argument("--test", type=int, default=2_000)
    text = parser.add_argument_group("sentences")
    text.add_argument("--style", type=float, default=_sentences.STYLE, help="free choices of unlabelled sentences")
    text.add_argument("--typo", type=float, default=_sentences.TYPO, help="mistyped words in them")
    text.add_argument("--free", type=float, default=0.0, help="free choices of all other sentences")
    text.add_argument("--prefers", type=float, default=1.0, help="times as likely: a noun that a verb prefers")
    text.add_argument("--least", type=int, default=0, help="times that each word is labelled, in the mean; rarer go")
    shape = parser.add_argument_group("models")
    shape.add_argument("--dimension", type=int, default=64)
    shape.add_argument("--layers", type=int, default=2)
    shape.add_argument("--dropout", type=float, default=0.1)
    course = parser.add_argument_group("course")
    course.add_argument("--warm", type=int, default=1_500, help="steps of the warm-up")
    course.add_argument("--steps", type=int, default=3_000, help="behind it")
    course.add_argument("--prior-steps", type=int, default=1_500)
    course.add_argument("--batch", type=int, default=32, help="pairs of a step")
    course.add_argument("--unlabelled-batch", type=int, default=32)
    course.add_argument("--rate", type=float, default=3e-3, help="highest of the warm-up")
    course.add_argument("--second-rate", type=float, default=1e-3, help="highest behind it")
    course.add_argument("--labelled-from", type=float, default=0.5, help="share of the labelled loss, at first")
    course.add_argument("--labelled-to", type=float, default=0.2, help="and at last")
    course.add_argument("--policy", type=float, default=0.03, help="weight of the policy gradient")
    course.add_argument("--alpha", type=float, default=0.01, help="share of the language model's reward")
    course.add_argument("--samples", type=int, default=2, help="K")
    course.add_argument("--baseline", default="leave_one_out", help="of the policy gradient")
    course.add_argument("--search", default="sample", choices=("sample", "beam"), help="how samples are found")
    course.add_argument("--per-token", action="store_true", help="rewards divided by lengths")
    course.add_argument("--constraint", type=float, default=0.01, help="weight of the probabilistic constraint")
    parser.add_argument("--beam", type=int, default=5, help="of the test")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("out/dual"))
    parser.add_argument("--workers", type=int, default=1, help="of one training, see above; they share its steps")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "SEED"), help="train this one alone")
    return _quick.parse(parser, given, **QUICK)


def main() -> None:
    args = parse()
    if args.one:
        one(args, args.one[0], int(args.one[1]))
        return
    print(json.dumps(summary(all_of_them(args), args)))


if __name__ == "__main__":
    main()
