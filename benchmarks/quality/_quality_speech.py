# SPDX-License-Identifier: Apache-2.0
"""A task of speech that levels off soon: one to three digits, spoken by espeak-ng, heard by one convolution with CTC.

The utterances are those of `_speech.py`, in its manners of speaking, but of ten words and in louder noise. What is
heard are CEPSTRA, the first coefficients of a cosine transform over the bands, since neighbouring bands are so alike
that a model of bands levels off late: after twice the minibatches it still is 4 % better. The convolution has a filter
of PIECE steps of 60 ms x CEPSTRA for each symbol. Like every listener with CTC it has to find out first which part of
an utterance is which digit.

    c_k = (k + 1.5) / 3.5 * sqrt(2 / B) * sum_j x_j cos(pi k (j + 1/2) / B)       of bands x_j; c_0 by root 2 smaller

Source: S. Davis, P. Mermelstein, IEEE ASSP 28 (1980), for mel-frequency cepstra; the first factor, which gives all of
them about the same spread, is ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from _reading import CHUNK, error_rate
from _speech import FEATURES, MOST_WORDS, TIMES, Utterances, minibatches, noisy, record
from _speech_reader import loss_of, read
from _speech_voices import BANDS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SYMBOLS = 1 + len(DIGITS)  # the blank of CTC, then the digits
JOINED = 2  # steps of 30 ms that make one
CEPSTRA = 13
PIECE = 4  # steps that a filter hears
LOUDNESS = (-5.0, 5.0)  # dB of speech over noise
TRAINING, HELD_OUT = 16_384, 4_096  # utterances


class Filters(nn.Module):
    """Scores of a symbol (0 is CTC's blank) at each step of an utterance."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(CEPSTRA * PIECE, SYMBOLS)

    def forward(self, heard: Tensor, times: Tensor) -> Tensor:
        """(B, T, CEPSTRA) of which `times` (B,) are not padding -> (B, T, SYMBOLS)."""
        batch, steps = heard.shape[:2]
        inside = (torch.arange(steps) < times[:, None])[:, :, None]
        pieces = F.pad(heard * inside, (0, 0, (PIECE - 1) // 2, PIECE // 2)).unfold(1, PIECE, 1)
        # Two dimensions: with three, stacked products would copy the weights for each utterance.
        scores: Tensor = self.score(pieces.reshape(batch * steps, CEPSTRA * PIECE))
        return scores.view(batch, steps, SYMBOLS)


@cache
def _transform() -> Tensor:
    """(BANDS, CEPSTRA)."""
    places, orders = torch.arange(BANDS)[:, None] + 0.5, torch.arange(CEPSTRA)
    cosines = torch.cos(torch.pi / BANDS * places * orders) * (2 / BANDS) ** 0.5
    cosines[:, 0] *= 0.5**0.5
    return cosines * (orders + 1.5) / 3.5


def cepstra(heard: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of 30 ms (B, at most TIMES, FEATURES) and their count (B,) -> steps of 60 ms (B, TIMES / 2, CEPSTRA)."""
    whole = F.pad(heard, (0, 0, 0, TIMES - heard.shape[1]))
    bands = whole.view(len(heard), TIMES // JOINED, JOINED * FEATURES // BANDS, BANDS).mean(2)
    return bands @ _transform(), -(-times // JOINED)


def digits(folder: Path, count: int, held_out: bool) -> Utterances:
    """Spoken digits, spoken once and kept in `folder`."""
    path = folder / f"{'held-out' if held_out else 'training'}-digits-{count}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file(vars(_numbered(record(DIGITS, count, held_out))), unfinished)
        unfinished.replace(path)  # so that whoever finds it finds all of it
    return Utterances(**load_file(path))


def _numbered(said: Utterances) -> Utterances:
    """With a number for each word in place of its letters."""
    words = [said.text(place).split() for place in range(len(said.lengths))]
    numbers = torch.zeros(len(words), MOST_WORDS, dtype=torch.int64)
    for row, mine in zip(numbers, words, strict=True):
        row[: len(mine)] = torch.tensor([DIGITS.index(word) + 1 for word in mine])
    return replace(said, numbers=numbers, lengths=(numbers > 0).sum(1))


def batches(folder: Path, count: int, batch: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """One minibatch after another; a training that hears fewer utterances needs no more."""
    said, whole = digits(folder, min(TRAINING, count * batch), held_out=False), -(-count // CHUNK) * CHUNK
    for heard, times, numbers, lengths in islice(minibatches(said, whole, batch, 1, seed, LOUDNESS), count):
        yield *cepstra(heard[0], times[0]), numbers[0], lengths[0]


def _held_out(folder: Path) -> tuple[Tensor, Tensor, Utterances]:
    said = digits(folder, HELD_OUT, held_out=True)
    heard = noisy(said.powers, said.noises, torch.Generator().manual_seed(0), LOUDNESS)
    return *cepstra(heard, said.times), said


@torch.no_grad()
def held_out_loss(model: nn.Module, folder: Path) -> float:
    """In nats per digit."""
    heard, times, said = _held_out(folder)
    return float(loss_of(model, heard, times, said.numbers, said.lengths))


def held_out_error(model: nn.Module, folder: Path) -> float:
    """Edits per digit, by greedy decoding."""
    heard, times, said = _held_out(folder)
    truths = [row[:length].tolist() for row, length in zip(said.numbers, said.lengths, strict=True)]
    return error_rate(read(model, heard, times), truths)
