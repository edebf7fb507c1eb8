# SPDX-License-Identifier: Apache-2.0
"""Pictures of short text lines, made from a number: the same (seed, index) is always the same line.

The words come from Python's standard library, the letters from the DejaVu fonts that Matplotlib
brings along, and the dirt (shift, scale, slant, blur, contrast, noise) from a random generator.
"""

from __future__ import annotations

import re
import sysconfig
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch.utils.data import Dataset

HEIGHT, WIDTH = 24, 128  # pixels of a picture
SHORTEST, LONGEST = 6, 14  # characters of a line, before spaces at its ends are cut off
MARGIN = 3  # pixels that stay free at both ends

# Number 0 is the blank of CTC, so a character's number is its place here plus one.
ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789.,:()[]=_-+'\"#"
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
SIZES = (11, 12, 13, 14)


def library_text(held_out: bool) -> str:
    """The library's top-level modules in lower case; every tenth file is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size < 200_000)
    if len(files) < 20:
        raise RuntimeError(
            f"found {len(files)} modules in {folder}, need at least 20: this Python was installed "
            "without its library's sources; use a full one"
        )
    chosen = [path for number, path in enumerate(files) if (number % 10 == 0) == held_out]
    text = " ".join(path.read_text(encoding="utf-8", errors="replace") for path in chosen).lower()
    return re.sub(f"[^{re.escape(ALPHABET[1:])}]+", " ", text)


def to_numbers(line: str) -> list[int]:
    return [ALPHABET.index(character) + 1 for character in line]


def to_text(numbers: list[int]) -> str:
    return "".join(ALPHABET[number - 1] for number in numbers)


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)


class Lines(Dataset):
    """`count` lines: picture (1, HEIGHT, WIDTH), numbers padded with 0 (LONGEST,), their count.

    Item i depends on (seed, i) alone, so it is the same on every worker and after a restart.
    """

    def __init__(self, text: str, count: int, seed: int) -> None:
        self.text, self.count, self.seed = text, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        dice = np.random.default_rng((self.seed, index))
        line = cut(self.text, dice)
        numbers = to_numbers(line)
        padded = torch.tensor(numbers + [0] * (LONGEST - len(numbers)))
        return torch.from_numpy(picture(line, dice))[None], padded, len(numbers)


def cut(text: str, dice: np.random.Generator) -> str:
    """A piece of the text; it is never empty, since the text has no two spaces in a row."""
    length = int(dice.integers(SHORTEST, LONGEST + 1))
    begin = int(dice.integers(len(text) - length))
    return text[begin : begin + length].strip()


def picture(line: str, dice: np.random.Generator) -> np.ndarray:
    """The line as a person might have scanned it: float32 (HEIGHT, WIDTH), about -1 to 1."""
    font = _font(FONTS[dice.integers(len(FONTS))], int(dice.choice(SIZES)))
    ink = Image.new("L", (2 * WIDTH, HEIGHT))
    ImageDraw.Draw(ink).text((0, HEIGHT / 2), line, fill=255, font=font, anchor="lm")
    warp = _warp(font.getlength(line), dice)
    image = ink.transform((WIDTH, HEIGHT), Image.Transform.AFFINE, warp, Image.Resampling.BILINEAR)
    image = image.filter(ImageFilter.GaussianBlur(dice.uniform(0.0, 0.8)))
    contrast = dice.uniform(0.5, 1.0) * (-1 if dice.random() < 0.8 else 1)  # a few white on black
    noise = dice.normal(0.0, dice.uniform(0.02, 0.2), (HEIGHT, WIDTH))
    return ((np.asarray(image) / 127.5 - 1.0) * contrast + noise).astype(np.float32)


def _warp(width: float, dice: np.random.Generator) -> tuple[float, ...]:
    """Where each pixel of the picture comes from: scale, slant and shift, with all ink inside."""
    room = WIDTH - 2 * MARGIN
    scale = min(dice.uniform(0.85, 1.2), room / width)
    left = MARGIN + dice.uniform() * max(0.0, room - scale * width)
    slant, down = dice.uniform(-0.15, 0.15), dice.uniform(-2.0, 2.0)
    middle = HEIGHT / 2
    return (1 / scale, slant, -left / scale - slant * middle, 0.0, 1.0, -down)
