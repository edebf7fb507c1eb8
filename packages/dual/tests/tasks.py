# SPDX-License-Identifier: Apache-2.0
"""Tasks so small that a training of a pair takes a fraction of a second: labels that are shifted, words reversed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline_dual.batches import Data
from paceline_dual.classifier import Classifier, LabelPrior
from paceline_dual.pair import Pair
from paceline_dual.sequences import pad, unpad
from paceline_dual.settings import Constraint, Course, Looks, Loop, Mix, Rates
from paceline_dual.transformer import LanguageModel, Seq2Seq

LABELS, WORDS = 5, 3
RATES = Rates(0.5, 0.3, 0.3)
LOOP = Loop(RATES, looks=Looks(every=8, samples=2), save_every=5)
COURSE = Course(warm=12, steps=12, mix=Mix(8, 6, 0.8, 0.4), loop=LOOP)
"""Of the labels' task; it ends with every output right."""
HELD = replace(COURSE, constraint=Constraint(0.05, 0.05))


def labels_pair(seed: int = 0) -> Pair:
    """Tables of logits both ways, and uniform priors."""
    torch.manual_seed(seed)
    return Pair(
        Classifier(nn.Embedding(LABELS, LABELS), LABELS),
        Classifier(nn.Embedding(LABELS, LABELS), LABELS),
        LabelPrior(LABELS),
        LabelPrior(LABELS),
    )


def labels_data(pairs: int = 40, alone: int = 30) -> Data:
    """y is x + 1."""
    x, held = draw(pairs, 1), draw(23, 2)
    return Data((x, shifted(x)), (held, shifted(held)), draw(alone, 3), shifted(draw(alone, 4)))


def draw(count: int, seed: int) -> Tensor:
    """Labels."""
    return torch.randint(0, LABELS, (count,), generator=torch.Generator().manual_seed(seed))


def shifted(x: Tensor) -> Tensor:
    """What stands on the other side."""
    return (x + 1) % LABELS


def words_pair(seed: int = 0) -> Pair:
    """Tiny Transformers."""
    torch.manual_seed(seed)
    size: dict[str, Any] = {"dimension": 8, "layers": 1, "heads": 2, "dropout": 0.1, "longest": 4}
    there, back = (Seq2Seq(WORDS, WORDS, **size) for _ in range(2))
    return Pair(there, back, LanguageModel(WORDS, **size), LanguageModel(WORDS, **size))


def words_data() -> Data:
    """y is x from its end to its beginning."""
    some = sequences(30, 1)
    held = sequences(9, 2)
    return Data((some, reverse(some)), (held, reverse(held)), sequences(20, 3), sequences(20, 4))


def sequences(count: int, seed: int) -> Tensor:
    """One to three words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, (count,), generator=generator).tolist()
    return pad([torch.randint(0, WORDS, (n,), generator=generator).tolist() for n in lengths])


def reverse(x: Tensor) -> Tensor:
    """What stands on the other side."""
    return pad([row[::-1] for row in unpad(x)])
