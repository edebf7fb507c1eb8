# SPDX-License-Identifier: Apache-2.0
"""Utterances of one to three words: spoken once, kept in a file as filter banks, and made noisy anew when used.

The words are the most frequent ones of docstrings and comments in Python's library. Training and held-out utterances
share them, not the manner of speaking. Level, kind of noise (white, or babble of several voices), its place and its
strength are drawn when an utterance is used: powers of independent sounds add, so the noise is added to the power in
each band. Which minibatch holds which utterances, and their noise, follow from the seed and the minibatch's number
alone, so all methods hear the same.
"""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from _reading import chunks
from _speech_voices import BANDS, HOP, RATE, bands, manners, spoken
from _words import lines_of
from safetensors.torch import load_file, save_file
from torch import Tensor

STACKED = 3  # frames of 10 ms that make a step
TIMES = 40  # steps at most
FRAMES, FEATURES = STACKED * TIMES, STACKED * BANDS
SILENT = -16.0  # logarithm of the least power
LONGEST = 18  # letters and spaces
WORDS, SHORTEST_WORD, LONGEST_WORD, MOST_WORDS = 300, 3, 7, 3
LOUDNESS = (5.0, 25.0)  # dB of speech over noise, at least and at most
LEVEL = 3.0  # dB that an utterance may be louder or softer
CENTRE, SPREAD = -5.75, 2.5  # of the logarithms, about
NOISE = 6_000  # frames of each kind of noise
VOICES = 6  # in babble

# Number 0 is the blank of CTC, so a character's number is its place here plus one.
ALPHABET = " abcdefghijklmnopqrstuvwxyz"
SYMBOLS = len(ALPHABET) + 1

Minibatches = tuple[Tensor, Tensor, Tensor, Tensor]
"""Features (..., B, steps, FEATURES) float32, their steps (..., B), numbers (..., B, LONGEST), their count (..., B)."""


@dataclass(frozen=True)
class Utterances:
    """What was said.

    Attributes:
        powers: (utterances, frames, BANDS), float16: logarithms, of the power over the utterance's mean power.
        times: (utterances,), int64: steps.
        numbers: (utterances, LONGEST), int64, padded with 0.
        lengths: (utterances,), int64.
        noises: (2, NOISE, BANDS), float32: powers of white noise and babble, with a mean of 1.
    """

    powers: Tensor
    times: Tensor
    numbers: Tensor
    lengths: Tensor
    noises: Tensor

    def text(self, place: int) -> str:
        """What one says."""
        return to_text(self.numbers[place, : self.lengths[place]].tolist())


def to_text(numbers: list[int]) -> str:
    """Characters of numbers that are not 0."""
    return "".join(ALPHABET[number - 1] for number in numbers)


@cache
def frequent_words() -> tuple[str, ...]:
    """The most frequent words of the library's top-level modules that can be spoken as words."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size < 100_000)[::3]
    if len(files) < 20:
        raise SystemExit(f"found {len(files)} modules in {folder}, need 20: use a Python with its library's sources")
    counts = Counter(word for path in files for line in lines_of(path) for word in line.lower().split())
    fitting = [word for word, _ in counts.most_common() if _fits(word)]
    return tuple(fitting[:WORDS])


def _fits(word: str) -> bool:
    letters = set(word)
    known = letters <= set(ALPHABET[1:]) and letters & set("aeiouy")  # others are spelled out, letter by letter
    return bool(known) and SHORTEST_WORD <= len(word) <= LONGEST_WORD


def texts(words: Sequence[str], count: int, dice: np.random.Generator) -> list[str]:
    """So many draws of one to three words."""
    found = []
    while len(found) < count:
        text = " ".join(dice.choice(words, dice.integers(1, MOST_WORDS + 1)))
        if len(text) <= LONGEST:
            found.append(text)
    return found


def record(words: Sequence[str], count: int, held_out: bool) -> Utterances:
    """Speak `count` utterances; those that take too long are left out, and others taken instead."""
    dice, ways = np.random.default_rng(2 if held_out else 1), manners(held_out)
    said = texts(words, count + count // 4 + 16, dice)
    how = [ways[place] for place in dice.integers(len(ways), size=len(said))]
    powers = [torch.from_numpy(power) for power in spoken(said, how)]
    chosen = [place for place, power in enumerate(powers) if len(power) <= FRAMES and power.sum() > 0][:count]
    if len(chosen) < count:
        raise SystemExit(f"only {len(chosen)} of {len(said)} utterances were short enough, need {count}")
    powers = [powers[place] / powers[place].sum(1).mean() for place in chosen]
    numbers = torch.zeros(count, LONGEST, dtype=torch.int64)
    for row, place in zip(numbers, chosen, strict=True):
        row[: len(said[place])] = torch.tensor([ALPHABET.index(letter) + 1 for letter in said[place]])
    logarithms = torch.full((count, FRAMES, BANDS), SILENT)
    for padded, power in zip(logarithms, powers, strict=True):
        padded[: len(power)] = power.log().clamp_min(SILENT)
    times = torch.tensor([-(-len(power) // STACKED) for power in powers])
    return Utterances(logarithms.half(), times, numbers, (numbers > 0).sum(1), noises_of(powers, dice))


def noises_of(powers: Sequence[Tensor], dice: np.random.Generator) -> Tensor:
    """White noise and babble of utterances, (2, NOISE, BANDS)."""
    white = torch.from_numpy(bands(dice.normal(size=(NOISE + 3) * HOP).astype(np.float32)))[:NOISE]
    voices = []
    for _ in range(VOICES):
        shortest = min(len(power) for power in powers)
        others = dice.integers(len(powers), size=NOISE // shortest + 1)
        voices.append(torch.cat([powers[place] for place in others])[:NOISE])
    noises = torch.stack([white, torch.stack(voices).mean(0)])
    return noises / noises.sum(2).mean(1)[:, None, None]


def kept(folder: Path, name: str, count: int, held_out: bool) -> Utterances:
    """The utterances of a file, which is written where it is missing."""
    path = folder / f"{name}-{count}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file(vars(record(frequent_words(), count, held_out)), unfinished)
        unfinished.replace(path)  # so that whoever finds it finds all of it
    return Utterances(**load_file(path))


def noisy(powers: Tensor, noises: Tensor, dice: torch.Generator, loudness: tuple[float, float] = LOUDNESS) -> Tensor:
    """Filter banks as they are heard, (utterances, frames, BANDS) to (utterances, steps, FEATURES)."""
    count, frames, _ = powers.shape
    begin = torch.randint(noises.shape[1] - frames, (count, 1), generator=dice)
    kind = torch.randint(len(noises), (count, 1), generator=dice)
    decibels = torch.empty(count, 1, 1).uniform_(*loudness, generator=dice)
    level = torch.empty(count, 1, 1).uniform_(-LEVEL, LEVEL, generator=dice)
    noise = noises[kind, begin + torch.arange(frames)]
    heard = powers.float().exp_().add_(noise * 10 ** (-decibels / 10)).mul_(10 ** (level / 10)).log_()
    return heard.sub_(CENTRE).div_(SPREAD).view(count, frames // STACKED, FEATURES)


def minibatches(
    said: Utterances, count: int, batch: int, workers: int, seed: int, loudness: tuple[float, float] = LOUDNESS
) -> Iterator[Minibatches]:
    """Steps of N workers (:func:`_reading.chunks`)."""

    def take(mine: Tensor, dice: torch.Generator) -> tuple[Tensor, ...]:
        heard = noisy(said.powers[mine], said.noises, dice, loudness)
        return heard, said.times[mine], said.numbers[mine], said.lengths[mine]

    for shaped in chunks(len(said.lengths), count, batch, workers, seed, take):
        for features, times, numbers, lengths in zip(*shaped, strict=True):
            yield features[:, :, : int(times.max())], times, numbers, lengths  # what is beyond is padding


def seconds(said: Utterances) -> float:
    """How long one is, in the mean."""
    return float(said.times.double().mean()) * STACKED * HOP / RATE
