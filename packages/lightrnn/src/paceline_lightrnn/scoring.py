# SPDX-License-Identifier: Apache-2.0
"""Scores a text with a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline import DataError
from paceline_lightrnn.corpus import Corpus, lanes
from paceline_lightrnn.language import LanguageModel
from paceline_lightrnn.state import PADDING

LEAST = 200
"""Least words of a lane: a short text has fewer lanes, since each begins from the zero state."""


@dataclass(frozen=True)
class Score:
    """The score of a text.

    Attributes:
        nats: the sum of -log P over the words.
        words: number of words.
    """

    nats: float
    words: int

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.words + other.words)

    @property
    def perplexity(self) -> float:
        """exp of the mean of -log P per word; inf on overflow."""
        mean = self.nats / self.words
        return math.exp(mean) if mean < 700 else math.inf


def place(model: LanguageModel) -> torch.device:
    """The device of a model's parameters."""
    return next(model.parameters()).device


@torch.no_grad()
def score(
    model: LanguageModel,
    corpus: Corpus,
    *,
    side_by_side: int = 20,
    window: int = 35,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Score a text in parallel lanes; each carries its state to its end.

    Args:
        model: dropout is off meanwhile.
        corpus: the text.
        side_by_side: lanes. A lane's first word is predicted from the end of a line, so few lanes change the result
            little; a text with less than `LEAST` words a lane has fewer.
        window: words at a time.
        part: (k, n) for the k-th of n workers, whose scores add up to the whole.
        progress: called with the number of words so far.

    Raises:
        DataError: the text has no words.
    """
    if not len(corpus):
        raise DataError("the text to be scored has no words; give another one")
    number = max(1, min(side_by_side, len(corpus) // LEAST))
    was, nats, words, state = model.training, 0.0, 0, None
    model.eval()
    try:
        for batch in lanes(corpus, number, window, part):
            batch = batch.to(place(model))
            state = model.begin(len(batch)) if state is None else state
            found, state = model.log_prob(batch, state)
            nats -= float(found.double().sum())
            words += int((batch != PADDING).sum())
            if progress is not None:
                progress(words)
    finally:
        model.train(was)
    return Score(nats, words)


def perplexity(model: LanguageModel, corpus: Corpus, *, side_by_side: int = 20, window: int = 35) -> float:
    """exp of the mean -log P of a word of the text: `score(...).perplexity`."""
    return score(model, corpus, side_by_side=side_by_side, window=window).perplexity
