# SPDX-License-Identifier: Apache-2.0
"""The frames of `_quality_frames.py`, heard by a bidirectional LSTM: the state of each frame, from a third of a second.

Every second frame is taken, and STEPS of them, one after another, are a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from _permutations import pieces
from _quality_frames import CLASSES, HELD_OUT, NONE, TRAINING, made
from _speech_reader import Bidirectional
from _speech_voices import BANDS
from torch import Tensor, nn

STEPS, EVERY = 16, 2  # of 10 ms
HIDDEN = 8  # each way


class Hearing(nn.Module):
    """Scores of the state of each frame of a piece."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.lstm = Bidirectional(BANDS, hidden)
        self.output = nn.Linear(2 * hidden, CLASSES)

    def forward(self, heard: Tensor) -> Tensor:
        """(B, STEPS, BANDS) -> (B STEPS, CLASSES)."""
        turned = torch.arange(STEPS - 1, -1, -1).expand(len(heard), STEPS)
        scores: Tensor = self.output(self.lstm(heard, turned).flatten(0, 1))
        return scores


def loss_of(model: nn.Module, heard: Tensor, states: Tensor) -> Tensor:
    """Of a minibatch, in nats per frame."""
    return F.cross_entropy(model(heard), states.flatten(), ignore_index=NONE)


def _utterances(whole: bool) -> tuple[int, int]:
    return (TRAINING, HELD_OUT) if whole else (60, 20)


@cache
def _samples(folder: Path, count: int, held_out: int, part: str) -> tuple[Tensor, Tensor]:
    """(pieces, STEPS, BANDS) and (pieces, STEPS); those without any state are left out."""
    found = made(folder, count, held_out)
    heard, states = found[f"{part}_bands"][::EVERY], found[f"{part}_states"][::EVERY]
    whole = len(heard) // STEPS * STEPS
    heard, states = heard[:whole].view(-1, STEPS, BANDS), states[:whole].view(-1, STEPS)
    some = (states != NONE).any(1)
    return heard[some], states[some]


def batches(folder: Path, count: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One minibatch after another, in permutations of all pieces."""
    heard, states = _samples(folder, *_utterances(count * batch * STEPS > 20_000), "training")
    for mine in islice(pieces(len(heard), batch, seed), count):
        yield heard[mine], states[mine]


@torch.no_grad()
def _judged(model: nn.Module, folder: Path) -> tuple[float, float]:
    whole = (folder / f"frames-{TRAINING}.safetensors").exists()
    heard, states = _samples(folder, *_utterances(whole), "held_out")
    scores = model(heard)
    wrong = (scores.argmax(1) != states.flatten())[states.flatten() != NONE]
    return float(F.cross_entropy(scores, states.flatten(), ignore_index=NONE)), float(wrong.float().mean())


def held_out_loss(model: nn.Module, folder: Path) -> float:
    """In nats per frame."""
    return _judged(model, folder)[0]


def held_out_error(model: nn.Module, folder: Path) -> float:
    """Share of frames whose state is not the most likely one."""
    return _judged(model, folder)[1]
