# SPDX-License-Identifier: Apache-2.0
"""The simplest language models that know a label: words one by one, as often as the label's texts have them.

    P(text | label) = P(length) * product over words w of P(w | label),    P(length) uniform
    P(text)         = sum over labels of P(label) P(text | label)

P(w | label) comes from counts, one being added to each; training changes only how sharp it is, one number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from paceline_dual import PADDING, LabelPrior, mask


def counts(texts: Tensor, words: int) -> Tensor:
    """How often each word stands in each text [B, T]: [B, words]."""
    there = mask(texts).float()
    return torch.zeros(len(texts), words).scatter_add_(1, texts.masked_fill(there == 0, 0), there)


class WordsByLabel(nn.Module):
    """P(text | label).

    Args:
        texts: [B, T] of which words are counted.
        labels: [B].
        words: number of words.
        classes: number of labels.
        longest: words of a text.
    """

    table: Tensor

    def __init__(self, texts: Tensor, labels: Tensor, words: int, classes: int, longest: int) -> None:
        super().__init__()
        found = counts(texts, words)
        self.register_buffer("table", torch.stack([(found[labels == k].sum(0) + 1).log() for k in range(classes)]))
        self.sharpness = nn.Parameter(torch.ones(()))
        self.longest = longest

    @property
    def log_probs(self) -> Tensor:
        """log P(word | label), [classes, words]."""
        return (self.sharpness * self.table).log_softmax(1)

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """log P(y | x) [B] of texts y [B, T] for labels x [B]."""
        there = mask(y)
        each = self.log_probs[x].gather(1, y.masked_fill(~there, 0))
        return (each * there).sum(1) - math.log(self.longest + 1)

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        """k texts for each label, [B, k, longest]."""
        drawn = torch.multinomial(self.log_probs[x].exp(), k * self.longest, True, generator=generator)
        ends = torch.randint(0, self.longest + 1, (len(x), k, 1), generator=generator)
        return drawn.view(len(x), k, self.longest).masked_fill(torch.arange(self.longest) >= ends, PADDING)

    @torch.no_grad()
    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The text without a word, which is the most probable, and the best of one word: [B, k, 1], log P [B, k]."""
        best, which = self.log_probs[x].topk(k - 1, 1)
        texts = torch.cat((torch.full((len(x), 1), PADDING), which), 1)
        return texts[..., None], torch.cat((torch.zeros(len(x), 1), best), 1) - math.log(self.longest + 1)


class WordsOfAll(nn.Module):
    """P(text), of all labels together."""

    def __init__(self, by_label: WordsByLabel, labels: LabelPrior) -> None:
        super().__init__()
        self.register_buffer("table", by_label.log_probs.detach().clone())
        self.register_buffer("shares", labels.log_probs.clone())
        self.longest = by_label.longest

    def log_prob(self, x: Tensor) -> Tensor:
        """log P(x) [B] of texts [B, T]."""
        there = mask(x)
        each = self.table[:, x.masked_fill(~there, 0)] * there  # [classes, B, T]
        return (each.sum(2) + self.shares[:, None]).logsumexp(0) - math.log(self.longest + 1)
