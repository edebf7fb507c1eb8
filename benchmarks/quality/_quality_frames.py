# SPDX-License-Identifier: Apache-2.0
"""Frames of speech: which third of which phone is heard, guessed by a network from a frame and its neighbours.

The task of the publications about block momentum and of speech middleware: a feed-forward network over a context
window, whose classes are states of an alignment. Here the synthesiser itself says where each phone begins, so nothing
has to be aligned. One to three words an utterance, white noise from 5 dB above the speech to 10 dB below it, and
held-out manners of speaking.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from _permutations import pieces
from _speech import frequent_words, texts
from _speech_phones import manners, spoken
from _speech_voices import BANDS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

BESIDE = 3  # frames on each side
INPUTS = (2 * BESIDE + 1) * BANDS
STATES = 3  # of a phone
RARE = 40  # frames of a phone; fewer are left out
NOISE_DB = (-5.0, 10.0)  # of speech over noise
HIDDEN = 32
TRAINING, HELD_OUT = 6_000, 800  # utterances
CLASSES = 3 * 64  # more than there are states: all models have one shape, whatever was said
NONE = -1  # the state of a frame that no sample has


class Frames(nn.Module):
    """Scores of each state, from a window of bands."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        sizes = (INPUTS, hidden, hidden)
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, CLASSES))

    def forward(self, windows: Tensor) -> Tensor:
        """(B, INPUTS) -> (B, CLASSES)."""
        scores: Tensor = self.layers(windows)
        return scores


def loss_of(model: nn.Module, windows: Tensor, states: Tensor) -> Tensor:
    """Of a minibatch, in nats per frame."""
    return F.cross_entropy(model(windows), states)


def utterances(count: int, held_out: bool) -> tuple[list[Tensor], list[list[str]]]:
    """Logarithms of the bands with noise, (frames, BANDS), and each frame's state by name."""
    dice, ways = np.random.default_rng(4 if held_out else 3), manners(held_out)
    said = texts(frequent_words(), count, dice)
    powers, phones = spoken(said, [ways[place] for place in dice.integers(len(ways), size=count)])
    heard = []
    for power in powers:
        loud = power.mean()
        noise = dice.exponential(size=power.shape) * loud * 10 ** (-dice.uniform(*NOISE_DB) / 10)
        heard.append(torch.from_numpy(np.log(power + noise + 1e-9 * loud) - np.log(loud)).float())
    return heard, [[f"{phone} {third}" for phone, third in mine] for mine in phones]


def made(folder: Path, count: int, held_out: int) -> dict[str, Tensor]:
    """Padded bands and states of all frames, one utterance after another; kept in `folder`."""
    path = folder / f"frames-{count}.safetensors"
    if not path.exists():
        heard, names = utterances(count, held_out=False)
        numbers = Counter(name for mine in names for name in mine)
        known = {name: number for number, name in enumerate(sorted(n for n, c in numbers.items() if c >= RARE))}
        if len(known) > CLASSES:
            raise SystemExit(f"{len(known)} states were spoken, and the model has {CLASSES}: raise CLASSES")
        bands = torch.cat(heard)
        mean, spread = bands.mean(0), bands.std(0)
        found = {}
        for part, (mine, said) in {"training": (heard, names), "held_out": utterances(held_out, True)}.items():
            found[f"{part}_bands"] = torch.cat([F.pad((one - mean) / spread, (0, 0, BESIDE, BESIDE)) for one in mine])
            edge = [NONE] * BESIDE
            every = [state for one in said for state in (*edge, *(known.get(name, NONE) for name in one), *edge)]
            found[f"{part}_states"] = torch.tensor(every)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file(found, unfinished)
        unfinished.replace(path)  # so that whoever finds it finds all of it
    return load_file(path)


@cache
def _samples(folder: Path, count: int, held_out: int, part: str) -> tuple[Tensor, Tensor, Tensor]:
    """(frames, BANDS), and the places and states of the samples."""
    found = made(folder, count, held_out)
    states = found[f"{part}_states"]
    places = (states != NONE).nonzero()[:, 0]
    return found[f"{part}_bands"], places, states[places]


def _windows(bands: Tensor, places: Tensor) -> Tensor:
    around = places[:, None] + torch.arange(-BESIDE, BESIDE + 1)
    return bands[around].flatten(1)


def _count(minibatches: int, batch: int) -> tuple[int, int]:
    """Utterances of training and held-out ones; short trainings need few."""
    return (TRAINING, HELD_OUT) if minibatches * batch > 20_000 else (60, 20)


def batches(folder: Path, count: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One minibatch after another, in permutations of all frames."""
    bands, places, states = _samples(folder, *_count(count, batch), "training")
    for mine in islice(pieces(len(places), batch, seed), count):
        yield _windows(bands, places[mine]), states[mine]


@torch.no_grad()
def _judged(model: nn.Module, folder: Path) -> tuple[float, float]:
    whole = (folder / f"frames-{TRAINING}.safetensors").exists()
    bands, places, states = _samples(folder, *((TRAINING, HELD_OUT) if whole else (60, 20)), "held_out")
    scores = model(_windows(bands, places))
    return float(F.cross_entropy(scores, states)), float((scores.argmax(1) != states).float().mean())


def held_out_loss(model: nn.Module, folder: Path) -> float:
    """In nats per frame."""
    return _judged(model, folder)[0]


def held_out_error(model: nn.Module, folder: Path) -> float:
    """Share of frames whose state is not the most likely one."""
    return _judged(model, folder)[1]
