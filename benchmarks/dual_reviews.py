# SPDX-License-Identifier: Apache-2.0
"""Sentiment of film reviews: does it help a classifier to agree with a language model that writes reviews to order?

The forward model P(label | text) averages word vectors; the backward one P(text | label) is a small Transformer that
knows the label, and the prior P(text) is one that does not. `plain` trains both by likelihood, `dual` holds them to
P(x) P(y|x) = P(y) P(x|y) as well, from the same warm start and in as many steps; its weights (of gap^2, over squared
length) are chosen on held-out reviews with the first seed. Dual inference asks the trained models of either together,
all labels of a review being tried; its weight is chosen on the same held-out reviews.

    python benchmarks/dual_reviews.py [--seeds 3] [--jobs 2] [--out out/dual_reviews]

Finished trainings in `--out` are kept, so that it goes on where it was stopped. The last line is a JSON object: mean
`accuracy` of plain and dual, each alone and with dual inference, the seeds' own, and the chosen weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _reviews
import torch
from torch import Tensor, nn

from paceline.dual.batches import Data
from paceline.dual.classifier import Classifier, LabelPrior, LabelToText
from paceline.dual.inference import DualInference
from paceline.dual.pair import Pair
from paceline.dual.sequences import mask
from paceline.dual.settings import Constraint, Course, Looks, Mix, Rates
from paceline.dual.training import train
from paceline.dual.transformer import LanguageModel

WEIGHTS = ((5.0, 0.5), (1.0, 0.5), (0.3, 0.1), (0.1, 0.1))
"""Of the constraint for classifier and writer, before they are divided by the length and squared; tried in turn."""
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
    return _reviews.prepare(_reviews.read(_reviews.fetch(args.out)), least=args.least)


def prior_of(args: argparse.Namespace, reviews: _reviews.Reviews) -> LanguageModel:
    """The language model of all labels together, trained once on the training part."""
    folder = args.out / "prior"
    if folder.exists():
        return LanguageModel.load(folder)
    torch.manual_seed(0)
    model = LanguageModel(len(reviews.words), args.dimension, 1, 4, args.dropout, _reviews.LONGEST)
    labels = torch.zeros(len(reviews.train[0]), dtype=torch.int64)
    # As the writer is trained, so that neither knows the text better: beside it stands a classifier of one class.
    pair = Pair(_Nothing(), _Alone(model), _Alone(model, frozen=True), LabelPrior(1))
    course = Course(args.warm, args.steps, "supervised", **_common(args, 0))
    train(pair, Data((reviews.train[0], labels), (reviews.dev[0], labels[: len(reviews.dev[0])])), course, args.out / "p")
    model.save(folder)
    return model
