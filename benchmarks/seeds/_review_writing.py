# SPDX-License-Identifier: Apache-2.0
"""Reviews written to order, and how much sentiment is in them.

Words of sentiment are those that VADER's lexicon rates at least `STRONG` (from -4 to 4). A judge outside the pair,
counts of words in reviews that it was not trained on, says whether a text is of the label that was asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import _reviews
import _word_counts
import torch
from torch import Tensor

from paceline_dual import LabelToText, LanguageModel, same_width, unpad

STRONG = 1.0
TEMPERATURES = (1.0, 0.7)
"""At 1 texts are drawn from P(text | label); at 0.7 from the model's more probable ones."""
CLASSES = 2


def write(
    writer: LabelToText | LanguageModel, reviews: _reviews.Reviews, each: int, temperature: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Texts [CLASSES * each, T], and the label that each was written for; a language model knows none."""
    sharper = copy.deepcopy(writer)
    with torch.no_grad():
        for parameter in sharper.writer.out.parameters():  # of the logits, which are linear in both
            parameter /= temperature
        sharper.writer.out.bias[reviews.words.index(_reviews.RARE)] = -1e9  # a writer has no word for it
    labels = torch.arange(CLASSES)
    dice = torch.Generator().manual_seed(seed)
    if isinstance(sharper, LanguageModel):
        texts = sharper.sample(CLASSES * each, generator=dice)
    else:
        texts = sharper.sample(labels, each, generator=dice).flatten(0, 1)
    return texts, labels.repeat_interleave(each)


class Judge:
    """Counts words of sentiment, and reads labels off texts.

    Args:
        reviews: the judge learns from the held-out and the test part.
        lexicon: word -> its rating.
    """

    def __init__(self, reviews: _reviews.Reviews, lexicon: Mapping[str, float]) -> None:
        ratings = torch.tensor([lexicon.get(word, 0.0) for word in reviews.words])
        self.words = reviews.words
        self.signs = ratings.sign() * (ratings.abs() >= STRONG)
        texts = torch.cat(same_width([reviews.dev[0], reviews.test[0]]))
        labels = torch.cat([reviews.dev[1], reviews.test[1]])
        self.counts = _word_counts.WordsByLabel(texts, labels, len(reviews.words), CLASSES, _reviews.LONGEST)

    def figures(self, texts: Tensor, labels: Tensor) -> dict[str, float]:
        """Shares of known words that have sentiment, the label's or the other's; and of texts read as their label's."""
        rows = [[word for word in row if self.words[word] != _reviews.RARE] for row in unpad(texts)]
        agrees = [self.signs[row] * (1 if label else -1) for row, label in zip(rows, labels.tolist(), strict=True)]
        words = torch.cat(agrees)
        with torch.no_grad():
            read = torch.stack([self.counts.log_prob(texts, torch.full_like(labels, k)) for k in range(CLASSES)], 1)
        return {
            "sentiment": float((words != 0).float().mean()),
            "agreeing": float((words > 0).float().mean()),
            "opposing": float((words < 0).float().mean()),
            "read_right": float((read.argmax(1) == labels).float().mean()),
            "words_of_a_text": len(words) / len(rows),
        }
