# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a text that is read as a stream: that of the equations, whoever reads which part."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline import DataError
from paceline_lightrnn.corpus import Corpus
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.scoring import LEAST, Score, perplexity, score
from paceline_lightrnn.table import WordTable


def model(dropout: float = 0.0) -> LightRNN:
    torch.manual_seed(1)
    return LightRNN(WordTable.random(20), 6, dropout=dropout)


def text(n: int) -> Corpus:
    return Corpus(np.random.default_rng(0).integers(0, 20, n).astype(np.int32))


def test_one_lane_is_the_whole_text_in_one_piece() -> None:
    mine, corpus = model(), text(57)
    log_probs, _ = mine.log_prob(torch.from_numpy(corpus.ids.astype(np.int64))[None])
    found = score(mine, corpus, side_by_side=1, window=10)
    assert found.words == 57 and found.nats == pytest.approx(-float(log_probs.sum().detach()), rel=1e-5)
    assert perplexity(mine, corpus) == pytest.approx(math.exp(-float(log_probs.mean().detach())), rel=1e-5)


def test_a_model_that_knows_nothing_has_the_perplexity_of_the_vocabulary() -> None:
    mine = model()
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.zero_()
    mine.table = WordTable(torch.arange(20), 4, 5)
    assert perplexity(mine, text(100)) == pytest.approx(20.0, rel=1e-5)


def test_the_parts_of_workers_add_up() -> None:
    mine, corpus = model(), text(5 * LEAST + 3)
    whole = score(mine, corpus, side_by_side=5)
    parts = [score(mine, corpus, side_by_side=5, part=(k, 7)) for k in range(7)]  # more workers than lanes
    both = sum(parts, Score(0.0, 0))
    assert both.words == whole.words == len(corpus) and both.nats == pytest.approx(whole.nats, rel=1e-6)


def test_dropout_is_off_and_on_again_and_no_gradient_is_kept() -> None:
    mine, corpus = model(dropout=0.5), text(60)
    mine.train()
    assert score(mine, corpus) == score(mine, corpus)
    assert mine.training and all(parameter.grad is None for parameter in mine.parameters())


def test_no_words_and_a_perplexity_too_large_for_a_number() -> None:
    with pytest.raises(DataError, match="no words"):
        score(model(), text(0))
    assert Score(1e6, 10).perplexity == math.inf
