# SPDX-License-Identifier: Apache-2.0
"""A pair that is not text on both sides: words that a synthesiser speaks, and their letters (`_sounds.py`).

Forward is recognition, P(letters | sound), and backward is synthesis, P(sound | letters), of principal components of
filter banks. A share of the words is labelled; other sounds have no letters and other words no sound. The methods are
those of `dual.py`: `warm`, `longer`, `back_translation`, `iterative`, `dual`, and `full` with all labels.

    python benchmarks/seeds/dual_speech.py [--seeds 3] [--jobs 2] [--out out/dual_speech]

Finished trainings in `--out` are kept, so that it goes on where it was stopped. The last line is a JSON object:
`trainings`, a row for each with `exact` (words right, in manners that no training hears), `letter_errors` over letters,
both also with dual inference (`exact_both`, `letter_errors_both`), and of the synthesis `explained`, the share of the
sounds' variance that its means have, and `nats` by which a sound is more probable to it than to the prior.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import _sounds
import _trainings
import dual
import torch
from _reading import error_rate
from torch import Tensor

from paceline_dual import (
    Data,
    DualInference,
    LanguageModel,
    Pair,
    PriorCourse,
    exact_match,
    joined,
    train,
    train_prior,
    unpad,
)

METHODS = ("warm", "full", "longer", "back_translation", "iterative", "dual")
SHOWN = ("exact", "exact_both", "letter_errors", "explained", "nats")
AT_A_TIME = 250


class Spoken:
    """The words' parts."""

    def __init__(self, args: argparse.Namespace) -> None:
        asked = args.labelled + 2 * args.unlabelled, args.dev + args.test
        if args.quick:
            known, heldout = (_sounds.imagined(count, args.features, seed) for seed, count in enumerate(asked, 1))
        else:
            known, heldout = _sounds.kept(args.out / "sounds.safetensors", *asked, args.features, args.words)
        self.labelled = known.part(0, args.labelled)
        self.x = known.part(args.labelled, args.unlabelled)[0]
        self.y = known.part(args.labelled + args.unlabelled, args.unlabelled)[1]
        self.dev, self.test = heldout.part(0, args.dev), heldout.part(args.dev, args.test)


def prior(args: argparse.Namespace, words: Spoken) -> LanguageModel:
    """P(letters), trained once on words without sound."""
    if not (args.out / "prior" / "model.json").exists():
        torch.manual_seed(0)
        model = LanguageModel(len(_sounds.LETTERS), args.dimension, args.layers, 4, args.dropout, _sounds.LONGEST)
        train_prior(model, words.y, PriorCourse(args.prior_steps, 64, args.rate))
        model.save(args.out / "prior")
    return LanguageModel.load(args.out / "prior")


def one(args: argparse.Namespace, method: str, seed: int) -> None:
    """Train one pair, and leave what came out."""
    torch.set_num_threads(1)
    words = Spoken(args)
    torch.manual_seed(seed)
    shape = (args.features, args.dimension, args.layers)
    hears, says = _sounds.Hears(*shape, args.hears_dropout), _sounds.Says(*shape, args.dropout)
    pair = Pair(hears, says, _sounds.Plain(), prior(args, words))
    if method in dual.AFTER_WARM:
        pair.load(args.out / f"warm-{seed}" / "model")
    count = args.labelled if method == "full" else round(args.labelled * args.share)
    labelled = words.labelled[0][:count], words.labelled[1][:count]
    looked_at = words.dev[0][:100], words.dev[1][:100]
    course = dual.course_of(args, method, seed)
    history = train(pair, Data(labelled, looked_at, words.x, words.y), course, args.out / f"{method}-{seed}")
    row = {"method": method, "seed": seed, "seconds": round(history[-1]["seconds"])}
    _trainings.leave(args.out, (method, seed), row | judged(args, pair, words))


def judged(args: argparse.Namespace, pair: Pair, words: Spoken) -> dict[str, float]:
    """Recognition and synthesis of the test part."""
    hears = pair.direction("forward")
    both = DualInference(hears.primal, hears.dual, hears.prior_target, beam=args.beam)
    weight = both.tune(_batches(words.dev)).weight
    found = [both.candidates(x) for x, _ in _batches(words.test)]
    x, y = words.test
    row: dict[str, float] = {"weight": weight}
    for name, a in (("", 1.0), ("_both", weight)):
        answers = joined([candidates.best(a) for candidates in found])
        row[f"exact{name}"] = exact_match(answers, y)
        row[f"letter_errors{name}"] = error_rate(unpad(answers), unpad(y))
    says = pair.backward_model
    assert isinstance(says, _sounds.Says)
    with torch.no_grad():
        row["explained"] = 1 - float((x - says.mean(y)).square().mean() / (x - x.mean(0)).square().mean())
        row["nats"] = float((says.log_prob(x, y) - pair.prior_x.log_prob(x)).mean())
    return row


def _batches(part: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(part[0].split(AT_A_TIME), part[1].split(AT_A_TIME), strict=True))


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for; `given` in place of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labelled", type=int, default=2_000, help="words in all")
    parser.add_argument("--share", type=float, default=0.1, help="of them that is labelled")
    parser.add_argument("--unlabelled", type=int, default=2_000, help="sounds, and words")
    parser.add_argument("--dev", type=int, default=200)
    parser.add_argument("--test", type=int, default=600)
    parser.add_argument("--features", type=int, default=32, help="principal components of a sound")
    parser.add_argument("--words", type=int, default=80, help="that are spoken, the most frequent")
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--hears-dropout", type=float, default=0.3, help="of the recognition")
    parser.add_argument("--warm", type=int, default=300, help="steps of the warm-up")
    parser.add_argument("--steps", type=int, default=400, help="after it")
    parser.add_argument("--prior-steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--beam", type=int, default=5, help="of the test")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=Path("out/dual_speech"))
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "SEED"), help=argparse.SUPPRESS)
    same = {name: vars(dual.parse([]))[name] for name in SAME}
    parser.set_defaults(workers=1, **same)
    return _quick.parse(parser, given, **QUICK)


SAME = (
    "batch",
    "unlabelled_batch",
    "rate",
    "second_rate",
    "labelled_from",
    "labelled_to",
    "policy",
    "alpha",
    "samples",
)
SAME += ("baseline", "search", "per_token", "constraint")
"""Settings that are `dual.py`'s own."""
QUICK: dict[str, Any] = {"labelled": 60, "unlabelled": 24, "dev": 8, "test": 8, "dimension": 16, "features": 8}
QUICK |= {"warm": 60, "steps": 4, "prior_steps": 4, "seeds": 1, "rate": 1e-2, "beam": 2, "only": ["warm", "dual"]}


def main() -> None:
    args = parse()
    if args.one:
        one(args, args.one[0], int(args.one[1]))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    prior(args, Spoken(args))
    seeds = range(args.seeds)
    _trainings.rows_of(args.out, [("warm", seed) for seed in seeds], args.jobs)
    rows = _trainings.rows_of(args.out, [(method, seed) for seed in seeds for method in args.only], args.jobs)
    for method in args.only:
        found = [row for row in rows if row["method"] == method]
        print(f"{method:17}", ", ".join(f"{key} {statistics.mean(row[key] for row in found):.3f}" for key in SHOWN))
    print(json.dumps({"trainings": rows}))


if __name__ == "__main__":
    main()
