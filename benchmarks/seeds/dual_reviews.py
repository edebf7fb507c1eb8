# SPDX-License-Identifier: Apache-2.0
"""Sentiment of film reviews: does it help a classifier to agree with a language model that writes reviews to order?

The forward model P(label | text) averages word vectors. The backward one P(text | label) is a small Transformer that
knows the label, and the prior P(text) is one that does not; with `--writer words` they are counts of words, by label
and of all labels (`_word_counts.py`). `plain` trains both by likelihood, `dual` holds them to
P(x) P(y|x) = P(y) P(x|y) as well, from the same warm start and in as many steps; its weights (of gap^2, over squared
length) are chosen on held-out reviews with the first seed. Dual inference asks the trained models of either together,
all labels of a review being tried; its weight is chosen on the same held-out reviews.

    python benchmarks/seeds/dual_reviews.py [--seeds 3] [--jobs 2] [--out out/dual_reviews]

With `--write` the question is the writer: every pair of weights in `WRITING` is trained from the same warm start as
`plain`, and writes reviews of each label (`_review_writing.py`); the share of words of sentiment in them is counted.

Finished trainings in `--out` are kept, so that it goes on where it was stopped. The last line is a JSON object: mean
accuracies of plain and dual, each alone and with dual inference, the seeds' own, and the chosen weights; with `--write`
`written`, a row for each training with its weights, `dev`, log P of a held-out review and figures of what it wrote
(`sentiment`, the share of words with any, those for and against the label, `read_right`), and `prior`, the same of the
language model that knows no label.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import _review_writing
import _reviews
import _trainings
import _word_counts
import torch
from torch import Tensor, nn

from paceline_dual import (
    Classifier,
    Constraint,
    Course,
    Data,
    DualInference,
    LabelPrior,
    LabelToText,
    LanguageModel,
    Looks,
    Loop,
    Mix,
    Pair,
    PriorCourse,
    Rates,
    exact_match,
    mask,
    train,
    train_prior,
    unpad,
)

WEIGHTS = {
    "transformer": ((5.0, 0.5), (1.0, 0.5), (0.3, 0.1), (0.1, 0.1)),
    "words": ((160.0, 0.5), (80.0, 0.5), (40.0, 0.5), (20.0, 0.5), (5.0, 0.5)),
}
"""Of the constraint for classifier and writer, before they are divided by the length and squared; tried in turn."""
WRITING = ((5.0, 0.5), (5.0, 5.0), (5.0, 15.0), (5.0, 50.0))
"""With `--write`; the first are those of the publication for sentiment."""
SHOWN = ("sentiment", "agreeing", "opposing", "read_right")
CLASSES = 2


class Bag(nn.Module):
    """Logits of a text [B, T]: the mean of its words' vectors, and two layers."""

    def __init__(self, words: int, dimension: int, dropout: float) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words, dimension)
        nn.init.normal_(self.vectors.weight, std=0.1)
        inner = nn.Linear(dimension, dimension), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dimension, CLASSES)
        self.rest = nn.Sequential(nn.Dropout(dropout), *inner)

    def forward(self, x: Tensor) -> Tensor:
        there = mask(x)[..., None]
        vectors = self.vectors(x.clamp(min=0)) * there
        logits: Tensor = self.rest(vectors.sum(1) / there.sum(1).clamp(min=1))
        return logits


def reviews_of(args: argparse.Namespace) -> _reviews.Reviews:
    found = _reviews.prepare(_reviews.read(_reviews.fetch(args.out)), least=args.least)
    dev, test = ((x[: args.judged], y[: args.judged]) for x, y in (found.dev, found.test))
    return replace(found, dev=dev, test=test)


def prior_of(args: argparse.Namespace, reviews: _reviews.Reviews) -> LanguageModel:
    """The language model of all labels together, trained once, on the training part, as long as the writer is."""
    folder = args.out / "prior"
    if (folder / "model.json").exists():
        return LanguageModel.load(folder)
    torch.manual_seed(0)
    model = LanguageModel(len(reviews.words), args.dimension, 1, 4, args.dropout, _reviews.LONGEST)
    train_prior(model, reviews.train[0], PriorCourse(args.warm + args.steps, args.batch, args.rate))
    model.save(folder)
    return model


def pair_of(args: argparse.Namespace, reviews: _reviews.Reviews, seed: int) -> Pair:
    """A fresh classifier and a fresh writer, and the priors."""
    torch.manual_seed(seed)
    words = len(reviews.words)
    known = [part[: args.labelled] for part in reviews.train]
    labels = LabelPrior(torch.bincount(known[1], minlength=CLASSES))
    if args.writer == "words":
        writer: nn.Module = _word_counts.WordsByLabel(*known, words, CLASSES, _reviews.LONGEST)
        prior: nn.Module = _word_counts.WordsOfAll(writer, labels)
    else:
        writer = LabelToText(words, CLASSES, args.dimension, 1, 4, args.dropout, _reviews.LONGEST)
        prior = prior_of(args, reviews)
    return Pair(Classifier(Bag(words, args.dimension, args.bag_dropout), CLASSES), writer, prior, labels)


def one(args: argparse.Namespace, name: str, seed: int) -> None:
    """Train one pair, and leave what came out. `name` is "warm", "plain", or the number of the weights."""
    torch.set_num_threads(1)  # other trainings have the other cores
    reviews = reviews_of(args)
    pair = pair_of(args, reviews, seed)
    if name != "warm":
        pair.load(args.out / f"warm-{seed}" / "model")
    weights = WRITING if args.write else WEIGHTS[args.writer]
    constraint = Constraint(*weights[int(name)], per="x") if name.isdigit() else Constraint()
    course = Course(
        args.warm if name == "warm" else 0,
        0 if name == "warm" else args.steps,
        "supervised",
        mix=Mix(labelled=args.batch),
        constraint=constraint,
        loop=Loop(
            Rates(args.rate, args.second_rate, args.second_rate),
            looks=Looks(every=10**9, samples=0),
            save_every=10**9,
            seed=seed,
        ),
    )
    looked_at = reviews.dev[0][:100], reviews.dev[1][:100]  # of the course alone: what is judged is judged below
    labelled = reviews.train[0][: args.labelled], reviews.train[1][: args.labelled]
    history = train(pair, Data(labelled, looked_at), course, args.out / f"{name}-{seed}")
    row = {"name": name, "seed": seed, "gap_rms": history[-1]["gap_rms"], **judged(pair, reviews)}
    if args.write:
        row |= {"weights": weights[int(name)] if name.isdigit() else (0.0, 0.0), **written(args, pair, reviews, seed)}
    _trainings.leave(args.out, (name, seed), row)
    print(f"{name}, seed {seed}: {row['test']:.4f} alone, {row['test_both']:.4f} together", flush=True)


def judged(pair: Pair, reviews: _reviews.Reviews) -> dict[str, Any]:
    """Accuracies: the classifier's own, and with the writer's opinion of every label, weighed as held-out data say."""
    forward = pair.direction("forward")
    both = DualInference(forward.primal, forward.dual, forward.prior_target, beam=CLASSES)
    choice = both.tune(_batches(reviews.dev))
    found = [(both.candidates(x), y) for x, y in _batches(reviews.test)]
    right = torch.cat([y for _, y in found])

    def accuracy(weight: float) -> float:
        return exact_match(torch.cat([candidates.best(weight) for candidates, _ in found]), right)

    return {
        "dev": dict(choice.tried)[1.0],
        "dev_both": choice.value,
        "weight": choice.weight,
        "test": accuracy(1.0),
        "test_both": accuracy(choice.weight),
        "test_writer": accuracy(0.0),
    }


def written(args: argparse.Namespace, pair: Pair, reviews: _reviews.Reviews, seed: int) -> dict[str, Any]:
    """What the writer writes at each temperature, and how probable the held-out reviews are to it."""
    judge = _review_writing.Judge(reviews, _reviews.lexicon(_reviews.fetch(args.out)))
    writer, temperatures = pair.backward_model, _review_writing.TEMPERATURES
    assert isinstance(writer, LabelToText)
    with torch.no_grad():
        log_probs = torch.cat([writer.log_prob(x, y) for x, y in _batches(reviews.dev)])
    texts = {str(t): _review_writing.write(writer, reviews, args.texts, t, seed) for t in temperatures}
    first = {t: [" ".join(reviews.words[word] for word in row) for row in unpad(rows[:: args.texts])]
             for t, (rows, _) in texts.items()}  # fmt: skip
    return {
        "dev_log_prob": float(log_probs.mean()),
        "written": {t: judge.figures(*both) for t, both in texts.items()},
        "reviews": judge.figures(*reviews.train),
        "first": first,
    }


def _batches(part: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(part[0].split(250), part[1].split(250), strict=True))


def summary(
    rows: dict[str, list[dict[str, Any]]], grid: list[dict[str, Any]], weights: tuple[float, float]
) -> dict[str, Any]:
    """The figures, for people on lines of their own and as one JSON object."""
    result: dict[str, Any] = {"weights": weights, "dev": {row["name"]: row["dev"] for row in grid}}
    for measure in ("test", "test_both", "test_writer"):
        each = {name: [row[measure] for row in found] for name, found in rows.items()}
        result[f"{measure}_each"] = each
        result[measure] = {name: round(statistics.mean(found), 4) for name, found in each.items()}
        for name, found in each.items():
            print(f"{measure:12} {name:6} {100 * statistics.mean(found):6.2f} %  {', '.join(map(str, found))}")
    return result


def writers(args: argparse.Namespace) -> dict[str, Any]:
    """Train with no constraint and at the weights that were asked for, and say what each writer writes."""
    seeds, names = range(args.seeds), ("plain", *map(str, args.weights))
    rows = _trainings.rows_of(args.out, [(name, seed) for seed in seeds for name in names], args.jobs)
    for name in names:
        found = [row for row in rows if row["name"] == name]
        for t in map(str, _review_writing.TEMPERATURES):
            told = [f"{key} {100 * statistics.mean(row['written'][t][key] for row in found):.2f} %" for key in SHOWN]
            print(f"weights {found[0]['weights']}, temperature {t}: {', '.join(told)}")
    reviews = reviews_of(args)
    prior, judge = prior_of(args, reviews), _review_writing.Judge(reviews, _reviews.lexicon(_reviews.fetch(args.out)))
    both = {str(t): _review_writing.write(prior, reviews, args.texts, t, 0) for t in _review_writing.TEMPERATURES}
    return {"written": rows, "prior": {t: judge.figures(*texts) for t, texts in both.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labelled", type=int, help="reviews whose labels are known; all by default, as texts always")
    parser.add_argument("--writer", choices=("transformer", "words"), default="transformer", help="P(text | label)")
    parser.add_argument("--write", action="store_true", help="judge what the writer writes")
    parser.add_argument("--judged", type=int, help="held-out reviews, and of the test; all by default")
    parser.add_argument("--weights", nargs="+", type=int, default=range(len(WRITING)), help="those of WRITING to train")
    parser.add_argument("--texts", type=int, default=1_000, help="written for each label")
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.2, help="of the writer and the prior")
    parser.add_argument("--bag-dropout", type=float, default=0.5, help="of the classifier")
    parser.add_argument("--least", type=int, default=8, help="times that a known word is there")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--warm", type=int, default=500, help="steps before the constraint")
    parser.add_argument("--steps", type=int, default=300, help="with it")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest before the constraint")
    parser.add_argument("--second-rate", type=float, default=1e-3, help="highest with it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=Path("out/dual_reviews"))
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    args = _quick.parse(parser, labelled=200, warm=4, steps=4, seeds=1, dimension=16, texts=10, judged=50, weights=[2])
    if args.one:
        one(args, args.one[0], int(args.one[1]))
        return
    torch.set_num_threads(1)
    if args.writer == "transformer":
        prior_of(args, reviews_of(args))
    seeds, weights = range(args.seeds), WEIGHTS[args.writer]
    _trainings.rows_of(args.out, [("warm", seed) for seed in seeds], args.jobs)
    if args.write:
        print(json.dumps(writers(args)))
        return
    grid = _trainings.rows_of(args.out, [(str(number), 0) for number in range(len(weights))], args.jobs)
    chosen = max(range(len(weights)), key=lambda number: grid[number]["dev"])
    names = {"plain": "plain", "dual": str(chosen)}
    rows = {
        name: _trainings.rows_of(args.out, [(what, seed) for seed in seeds], args.jobs) for name, what in names.items()
    }
    print(json.dumps(summary(rows, grid, weights[chosen])))


if __name__ == "__main__":
    main()
