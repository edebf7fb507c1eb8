# SPDX-License-Identifier: Apache-2.0
"""Words and how they sound, as numbers; a model that hears words, and one that says them.

A sound is the logarithm of the power in 26 bands over a word that espeak-ng speaks, FRAMES frames long whatever the
word's length, projected on its first principal directions and scaled to variance 1: a density of it is the standard
normal one. Training and held-out words share spelling, not the manner of speaking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _speech import frequent_words
from _speech_voices import BANDS, manners, spoken
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from paceline_dual import mask, pad, search, undisturbed
from paceline_dual.layers import Encoder
from paceline_dual.sequences import check
from paceline_dual.writer import Writer

FRAMES = 12
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONGEST = 8
LEAST_SPREAD = -0.35
"""Logarithm of it: a word in another voice is no nearer to the mean, however well the heard ones are known."""
SILENT = 1e-7  # power, of the word's mean power


@dataclass(frozen=True)
class Words:
    """Sounds x [N, features] float32 and spellings y [N, T] int64."""

    x: Tensor
    y: Tensor

    def part(self, begin: int, count: int) -> tuple[Tensor, Tensor]:
        """`count` of them."""
        return self.x[begin : begin + count], self.y[begin : begin + count]


def spelled(words: Sequence[str]) -> Tensor:
    """Words as numbers of letters."""
    return pad([[LETTERS.index(letter) for letter in word] for word in words])


def kept(path: Path, train: int, heldout: int, features: int, words: int) -> tuple[Words, Words]:
    """Words for training, and others in manners that no training hears; from a file, which is written once."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_made(train, heldout, features, words), path)
    found = load_file(path)
    return Words(found["x"], found["y"]), Words(found["heldout_x"], found["heldout_y"])


def _made(train: int, heldout: int, features: int, words: int) -> dict[str, Tensor]:
    dice, known, sides = np.random.default_rng(0), frequent_words()[:words], []
    for count, apart in ((train, False), (heldout, True)):
        said, ways = dice.choice(known, count).tolist(), manners(apart)
        powers = spoken(said, [ways[place] for place in dice.integers(len(ways), size=count)])
        sides.append((torch.stack([_even(torch.from_numpy(power)) for power in powers]), spelled(said)))
    mean, directions = sides[0][0].mean(0), torch.pca_lowrank(sides[0][0], features, niter=8)[2]
    x, other = ((heard - mean) @ directions for heard, _ in sides)
    scale = x.std(0)
    return {"x": x / scale, "y": sides[0][1], "heldout_x": other / scale, "heldout_y": sides[1][1]}


def _even(power: Tensor) -> Tensor:
    """[FRAMES * BANDS] of the power [frames, BANDS] of a word: means over even parts of it, as logarithms."""
    relative = (power / power.sum(1).mean()).clamp_min(SILENT).log()
    return F.adaptive_avg_pool1d(relative.T, FRAMES).T.reshape(FRAMES * BANDS)


def imagined(count: int, features: int, seed: int) -> Words:
    """Words without espeak-ng, for the quick form: each letter of a place is a vector."""
    dice = torch.Generator().manual_seed(seed)
    sounds = torch.randn(2, 3, features, generator=torch.Generator().manual_seed(0))  # two letters, of three each
    y = torch.randint(3, (count, 2), generator=dice)
    heard = sounds[torch.arange(2), y].sum(1)
    return Words(heard + 0.1 * torch.randn(count, features, generator=dice), y)


class Hears(nn.Module):
    """P(letters | sound): a decoder that attends to `memory` vectors made of the sound."""

    def __init__(self, features: int, dimension: int, layers: int, dropout: float, memory: int = 6) -> None:
        super().__init__()
        self.memory = memory
        self.read = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(features, 4 * dimension),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4 * dimension, memory * dimension),
        )
        self.writer = Writer(len(LETTERS), dimension, layers, 4, dropout, LONGEST, cross=True)

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """log P(y | x) [B]; see `Conditional`."""
        return self.writer.log_prob(check(y, len(LETTERS), LONGEST), self._heard(x))

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Spellings [B, k, T]."""
        with undisturbed(self):
            return search.sample(self.writer.steps(len(x), k, self._heard(x)), len(x), k, x.device, generator)

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Spellings [B, k, T] and their log P [B, k]."""
        with undisturbed(self):
            return search.beam(self.writer.steps(len(x), k, self._heard(x)), len(x), k, x.device)

    def _heard(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        return self.writer.project(self.read(x).view(len(x), self.memory, -1))


class Says(nn.Module):
    """P(sound | letters): normal about a mean that the letters give, with a spread of each number that is learned."""

    def __init__(self, features: int, dimension: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.encoder = Encoder(len(LETTERS), dimension, layers, 4, dropout)
        self.out = nn.Sequential(nn.Linear(dimension, 4 * dimension), nn.ReLU(), nn.Linear(4 * dimension, features))
        self.logarithms = nn.Parameter(torch.zeros(features))

    @property
    def spread(self) -> Tensor:
        """Logarithm of the standard deviation of each number, [features]."""
        return self.logarithms.clamp(min=LEAST_SPREAD)

    def mean(self, x: Tensor) -> Tensor:
        """The most probable sound [B, features] of letters [B, T]."""
        vectors, _ = self.encoder(check(x, len(LETTERS), None))
        there = F.pad(mask(check(x)), (1, 0), value=True)[..., None]
        mean: Tensor = self.out((vectors * there).sum(1) / there.sum(1))
        return mean

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """log P(y | x) [B] of sounds y for letters x."""
        return normal(y, self.mean(x), self.spread)

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Sounds [B, k, features]."""
        with undisturbed(self):
            mean = self.mean(x)[:, None]
            noise = torch.randn(len(x), k, mean.shape[2], generator=generator)
            return mean + noise * self.spread.exp()

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The most probable sound alone [B, k, features]: a density has no second best."""
        with undisturbed(self):
            mean = self.mean(x)
            log_probs = torch.full((len(x), k), -torch.inf)
            log_probs[:, 0] = normal(mean, mean, self.spread)
            return mean[:, None].repeat(1, k, 1), log_probs


class Plain(nn.Module):
    """P(sound): the standard normal density."""

    def log_prob(self, x: Tensor) -> Tensor:
        """log P(x) [B]."""
        return normal(x, torch.zeros_like(x), x.new_zeros(x.shape[1]))


def normal(x: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """log density [B] of x [B, n] about `mean`; `spread` [n] are logarithms of standard deviations."""
    far = ((x - mean) / spread.exp()) ** 2
    return -(far / 2 + spread + math.log(2 * math.pi) / 2).sum(1)
