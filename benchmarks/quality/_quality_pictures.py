# SPDX-License-Identifier: Apache-2.0
"""Letters and digits in pictures of 32 x 32, told apart by a small network of AlexNet's shape.

Five convolutions and three dense layers, with pooling after the first, the second and the fifth (A. Krizhevsky et al.,
NIPS 2012), and normalisation after the first two: of groups here, where AlexNet's is of neighbouring channels. Dropout
is left out: stacked workers have no random layers. The letters come from the
fonts that Matplotlib brings along, turned, moved and scaled, before waves of another grey; noise is drawn when a
picture is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import islice, pairwise
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from _permutations import pieces
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SIDE, DRAWN = 32, 48  # pixels
SYMBOLS = "0123456789"
FONTS = "DejaVuSans*.ttf"
ANGLE, SHIFT, SIZES = 5.0, 1.0, (24, 27)  # degrees and pixels, each at most
WAVE, NOISE = 0.2, 1.2  # their height and spread, where a letter has 1
WIDTH = 6  # channels of the first convolution
TRAINING, HELD_OUT, FEW = 24_576, 4_096, 256  # pictures


class Layers(nn.Module):
    """Scores of each symbol."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        channels = (width, 2 * width, 2 * width, 2 * width)
        self.convolutions = nn.ModuleList([nn.Conv2d(1, width, 5, 2, 2)])
        self.convolutions.extend(nn.Conv2d(one, 2 * width, 3, 1, 1) for one in channels)
        self.norms = nn.ModuleList(nn.GroupNorm(1, count) for count in (width, 2 * width))
        sizes = (2 * width * 4, 4 * width, 4 * width, len(SYMBOLS))
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        for layer in (*self.convolutions, *self.dense):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, pictures: Tensor) -> Tensor:
        """(B, 1, SIDE, SIDE) -> (B, symbols)."""
        seen = pictures
        for number, layer in enumerate(self.convolutions):
            seen = layer(seen).relu()
            if number < len(self.norms):
                seen = self.norms[number](seen)
            if number in (0, 1, 4):
                seen = F.max_pool2d(seen, 2)
        first, second, last = self.dense
        scores: Tensor = last(second(first(seen.flatten(1)).relu()).relu())
        return scores


def loss_of(model: nn.Module, pictures: Tensor, symbols: Tensor) -> Tensor:
    """Of a minibatch, in nats per picture."""
    return F.cross_entropy(model(pictures), symbols)


def fonts() -> list[Path]:
    """Files, in order."""
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return sorted(path for path in folder.glob(FONTS) if "Display" not in path.name)  # which has no digits


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pictures (count, SIDE, SIDE) without noise, float16, and their symbols (count,)."""
    dice, found, symbols = np.random.default_rng(seed), np.empty((count, SIDE, SIDE), np.float16), []
    letters = [ImageFont.truetype(str(path), size) for path in fonts() for size in range(*SIZES)]
    y, x = np.mgrid[:SIDE, :SIDE]
    for number in range(count):
        symbols.append(int(dice.integers(len(SYMBOLS))))
        canvas = Image.new("L", (DRAWN, DRAWN))
        middle = (DRAWN / 2 + dice.uniform(-SHIFT, SHIFT), DRAWN / 2 + dice.uniform(-SHIFT, SHIFT))
        letter = letters[dice.integers(len(letters))]
        ImageDraw.Draw(canvas).text(middle, SYMBOLS[symbols[-1]], fill=255, font=letter, anchor="mm")
        turned = canvas.rotate(dice.uniform(-ANGLE, ANGLE), Image.Resampling.BILINEAR)
        edge = (DRAWN - SIDE) // 2
        ink = np.asarray(turned)[edge : edge + SIDE, edge : edge + SIDE] / 255
        to_x, to_y, begin = dice.uniform(-1, 1), dice.uniform(-1, 1), dice.uniform(0, 2 * np.pi)
        found[number] = ink + WAVE * np.cos(to_x * x + to_y * y + begin)
    return torch.from_numpy(found), torch.tensor(symbols)


def made(folder: Path, count: int, part: str) -> dict[str, Tensor]:
    """`pictures` and `symbols`, kept in `folder`."""
    path = folder / f"pictures-{part}-{count}.safetensors"
    if not path.exists():
        pictures, symbols = drawn(count, seed=5 if part == "training" else 6)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file({"pictures": pictures, "symbols": symbols}, unfinished)
        unfinished.replace(path)  # so that whoever finds it finds all of it
    return load_file(path)


@cache
def _samples(folder: Path, count: int, part: str) -> tuple[Tensor, Tensor]:
    found = made(folder, count, part)
    return found["pictures"], found["symbols"]


def _noisy(pictures: Tensor, dice: torch.Generator) -> Tensor:
    noise = torch.empty(pictures.shape).normal_(generator=dice)
    return noise.add_(pictures, alpha=1 / NOISE)[:, None]


def batches(folder: Path, count: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One minibatch after another, in permutations of all pictures."""
    pictures, symbols = _samples(folder, min(TRAINING, count * batch), "training")
    dice = torch.Generator().manual_seed(seed + 1)
    for mine in islice(pieces(len(pictures), batch, seed), count):
        yield _noisy(pictures[mine], dice), symbols[mine]


@torch.no_grad()
def _judged(model: nn.Module, folder: Path) -> tuple[float, float]:
    whole = (folder / f"pictures-training-{TRAINING}.safetensors").exists()
    pictures, symbols = _samples(folder, HELD_OUT if whole else FEW, "held_out")
    noisy = _noisy(pictures, torch.Generator().manual_seed(0))
    scores = torch.cat([model(part) for part in noisy.split(512)])
    return float(F.cross_entropy(scores, symbols)), float((scores.argmax(1) != symbols).float().mean())


def held_out_loss(model: nn.Module, folder: Path) -> float:
    """In nats per picture."""
    return _judged(model, folder)[0]


def held_out_error(model: nn.Module, folder: Path) -> float:
    """Share of pictures whose symbol is not the most likely one."""
    return _judged(model, folder)[1]
