# SPDX-License-Identifier: Apache-2.0
"""Pictures of short lines of text: rendered once, kept in a file, and made dirty anew in each minibatch.

The words come from Python's library (every tenth module is held out), the letters from the DejaVu fonts that Matplotlib
brings along. Font, size, slant, scale, place and blur are drawn when a line is rendered; a shift by whole pixels,
contrast and noise when it is used. Which minibatch holds which lines, and their dirt, follow from the seed and the
minibatch's number alone, so all methods see the same.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import torch
from _reading import chunks
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from safetensors.torch import load_file, save_file
from torch import Tensor

HEIGHT, WIDTH = 16, 72  # pixels
SHORTEST, LONGEST = 6, 12  # characters of a line, before spaces at its ends are cut off
MARGIN, SHIFT = 2, 2  # pixels free at the ends; the furthest shift to a side

# Number 0 is the blank of CTC, so a character's number is its place here plus one.
ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789"
SYMBOLS = len(ALPHABET) + 1

FONTS = [
    f"DejaVu{family}{style}.ttf"
    for family, styles in (
        ("Sans", ("", "-Bold", "-Oblique", "-BoldOblique")),
        ("SansMono", ("", "-Bold", "-Oblique", "-BoldOblique")),
        ("Serif", ("", "-Bold", "-Italic", "-BoldItalic")),
    )
    for style in styles
]
SIZES = (9, 10)

Minibatches = tuple[Tensor, Tensor, Tensor]
"""Pictures (..., B, HEIGHT, WIDTH) float32, numbers padded with 0 (..., B, LONGEST), their count (..., B)."""


@dataclass(frozen=True)
class Lines:
    """Rendered lines.

    Attributes:
        pictures: (lines, HEIGHT, WIDTH), uint8: 0 is paper, 255 is ink.
        numbers: (lines, LONGEST), int64, padded with 0.
        lengths: (lines,), int64.
    """

    pictures: Tensor
    numbers: Tensor
    lengths: Tensor

    def part(self, begin: int, end: int) -> Lines:
        """Lines begin to end."""
        return Lines(self.pictures[begin:end], self.numbers[begin:end], self.lengths[begin:end])


def library_text(held_out: bool) -> str:
    """The library's top-level modules as letters, digits and single spaces; every tenth module is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size < 300_000)
    if len(files) < 20:
        raise SystemExit(f"found {len(files)} modules in {folder}, need 20: use a Python with its library's sources")
    chosen = [path for number, path in enumerate(files) if (number % 10 == 0) == held_out]
    text = " ".join(path.read_text(encoding="utf-8", errors="replace") for path in chosen).lower()
    return re.sub("[^a-z0-9]+", " ", text)


def to_text(numbers: list[int]) -> str:
    """Characters of numbers that are not 0."""
    return "".join(ALPHABET[number - 1] for number in numbers)


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)


def _picture(line: str, dice: np.random.Generator, across: int) -> np.ndarray:
    """A line in some font, slanted, scaled, moved and blurred: uint8 (HEIGHT, across)."""
    font = _font(FONTS[dice.integers(len(FONTS))], int(dice.choice(SIZES)))
    ink = Image.new("L", (2 * across, HEIGHT))
    ImageDraw.Draw(ink).text((0, HEIGHT / 2), line, fill=255, font=font, anchor="lm")
    width, room = max(1.0, font.getlength(line)), across - 2 * (MARGIN + SHIFT)
    scale = min(dice.uniform(0.9, 1.15), room / width)
    left = MARGIN + SHIFT + dice.uniform() * (room - scale * width)
    slant, down = dice.uniform(-0.1, 0.1), dice.uniform(-1.0, 1.0)
    warp = (1 / scale, slant, -left / scale - slant * HEIGHT / 2, 0.0, 1.0, -down)
    image = ink.transform((across, HEIGHT), Image.Transform.AFFINE, warp, Image.Resampling.BILINEAR)
    return np.asarray(image.filter(ImageFilter.GaussianBlur(dice.uniform(0.0, 0.4))))


def render(
    text: str, count: int, seed: int, shortest: int = SHORTEST, longest: int = LONGEST, width: int = WIDTH
) -> Lines:
    """`count` lines out of the text."""
    dice = np.random.default_rng(seed)
    pictures = np.zeros((count, HEIGHT, width), np.uint8)
    numbers, lengths = torch.zeros(count, longest, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    for place in range(count):
        length = int(dice.integers(shortest, longest + 1))
        begin = int(dice.integers(len(text) - length))
        line = text[begin : begin + length].strip()
        pictures[place] = _picture(line, dice, width)
        numbers[place, : len(line)] = torch.tensor([ALPHABET.index(character) + 1 for character in line])
        lengths[place] = len(line)
    return Lines(torch.from_numpy(pictures), numbers, lengths)


def kept(folder: Path, name: str, count: int, held_out: bool) -> Lines:
    """The lines of a file, which is written where it is missing."""
    path = folder / f"{name}-{count}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        lines = render(library_text(held_out), count, seed=2 if held_out else 1)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file({"pictures": lines.pictures, "numbers": lines.numbers, "lengths": lines.lengths}, unfinished)
        unfinished.replace(path)  # so that whoever finds it finds all of it
    found = load_file(path)
    return Lines(found["pictures"], found["numbers"], found["lengths"])


def dirty(pictures: Tensor, dice: torch.Generator) -> Tensor:
    """Shifted, fainter, noisy: uint8 (lines, HEIGHT, WIDTH) to float32, about 0 (paper) to 2."""
    count, _, width = pictures.shape
    shift = torch.randint(-SHIFT, SHIFT + 1, (count, 1, 1), generator=dice)
    source = (torch.arange(width) - shift) % width  # the margins are empty, so nothing comes in again
    moved = pictures.gather(2, source.expand_as(pictures))
    contrast = torch.empty(count, 1, 1).uniform_(0.6, 1.0, generator=dice)
    strength = torch.empty(count, 1, 1).uniform_(0.05, 0.2, generator=dice)
    noise = torch.randn(moved.shape, generator=dice).mul_(strength)
    # Paper is 0: were it -1, the first layer would see little but paper, and learn slowly.
    return moved.float().div_(127.5).mul_(contrast).add_(noise)


def minibatches(lines: Lines, count: int, batch: int, workers: int, seed: int) -> Iterator[Minibatches]:
    """Steps of N workers (:func:`_reading.chunks`)."""

    def take(mine: Tensor, dice: torch.Generator) -> tuple[Tensor, ...]:
        return dirty(lines.pictures[mine], dice), lines.numbers[mine], lines.lengths[mine]

    for shaped in chunks(len(lines.lengths), count, batch, workers, seed, take):
        yield from zip(*shaped, strict=True)  # type: ignore[misc]
