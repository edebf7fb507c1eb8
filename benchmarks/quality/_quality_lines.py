# SPDX-License-Identifier: Apache-2.0
"""A task of reading that levels off soon: numbers of two to four digits, read by one convolution with CTC.

The pictures are those of `_lines.py`, but narrower: twelve fonts, slanted, scaled and blurred when they are rendered,
shifted, fainter and noisy when they are used. The convolution has a filter of HEIGHT x PIECE pixels for each symbol, so
it soon is as good as it can be. Like every reader with CTC it has to find out first which part of a picture is which
symbol.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from _lines import ALPHABET, HEIGHT, Lines, dirty, minibatches, render
from _lines_reader import PIECE, STRIDE, loss_of, read
from _reading import error_rate
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WIDTH = 36  # pixels
SHORTEST, LONGEST = 2, 4  # digits
SYMBOLS = 11  # the blank of CTC, then the digits
TRAINING, HELD_OUT = 65_536, 256 if "--quick" in sys.argv else 8_192  # lines


class Templates(nn.Module):
    """Scores of a symbol (0 is CTC's blank) at WIDTH / STRIDE places of a line."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(HEIGHT * PIECE, SYMBOLS)

    def forward(self, pictures: Tensor) -> Tensor:
        """(B, HEIGHT, WIDTH) -> (B, WIDTH / STRIDE, SYMBOLS)."""
        edge = PIECE - STRIDE
        pieces = F.pad(pictures, ((edge + 1) // 2, edge // 2)).unfold(2, PIECE, STRIDE).transpose(1, 2)
        lines, times = pieces.shape[:2]
        # Two dimensions: with three, stacked products would copy the weights for each line.
        scores: Tensor = self.score(pieces.reshape(lines * times, HEIGHT * PIECE))
        return scores.view(lines, times, SYMBOLS)


def numbers(folder: Path, count: int, held_out: bool) -> Lines:
    """Pictures of numbers, rendered once and kept in `folder`."""
    path = folder / f"{'held-out' if held_out else 'training'}-numbers-{count}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file(vars(_rendered(count, seed=2 if held_out else 1)), unfinished)
        unfinished.replace(path)  # so that whoever finds it finds all of it
    return Lines(**load_file(path))


def _rendered(count: int, seed: int) -> Lines:
    digits = np.random.default_rng(seed).integers(10, size=LONGEST * count)
    lines = render("".join(map(str, digits)), count, seed, SHORTEST, LONGEST, WIDTH)
    before = ALPHABET.index("0")  # symbols of `_lines.py` that are no digits
    return Lines(lines.pictures, (lines.numbers - before).clamp_min(0), lines.lengths)


def batches(folder: Path, count: int, batch: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """One minibatch after another; a training that reads fewer lines needs no more."""
    lines = numbers(folder, min(TRAINING, count * batch), held_out=False)
    for rows in minibatches(lines, count, batch, 1, seed):
        yield tuple(tensor[0] for tensor in rows)


def _held_out(folder: Path) -> tuple[Tensor, Lines]:
    lines = numbers(folder, HELD_OUT, held_out=True)
    return dirty(lines.pictures, torch.Generator().manual_seed(0)), lines


@torch.no_grad()
def held_out_loss(model: nn.Module, folder: Path) -> float:
    """In nats per digit."""
    pictures, lines = _held_out(folder)
    return float(loss_of(model, pictures, lines.numbers, lines.lengths))


def held_out_error(model: nn.Module, folder: Path) -> float:
    """Edits per digit, by greedy decoding."""
    pictures, lines = _held_out(folder)
    truths = [row[:length].tolist() for row, length in zip(lines.numbers, lines.lengths, strict=True)]
    return error_rate(read(model, pictures), truths)
