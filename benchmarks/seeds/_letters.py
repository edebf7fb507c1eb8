# SPDX-License-Identifier: Apache-2.0
"""Letters on photographs: 26 classes, in the fonts that Matplotlib brings along, on two photographs of scikit-learn's.

A letter is turned, scaled, sheared and shifted at random, and its ink is brighter or darker than the photograph, mostly
towards the middle of the scale; the held-out pictures have other parts of the photographs behind them. A minibatch cuts
each picture out of a larger one at a random place, and adds noise.
"""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SIDE, MARGIN, DRAWN = 16, 1, 40  # pixels of a picture, around it, and of the letter that it is made from
WHOLE = SIDE + 2 * MARGIN
LETTERS = string.ascii_uppercase
FONTS = [
    *(f"DejaVuSans{style}.ttf" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}.ttf" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}.ttf" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}.ttf" for style in ("", "Bol", "Italic", "BolIta")),
    *(f"cm{style}10.ttf" for style in ("r", "b", "ss", "tt", "ti", "mi")),
]
LARGEST_ANGLE, LARGEST_SHEAR, LARGEST_SHIFT = 0.3, 0.2, 0.15  # radians; of a side; of half a side
CONTRAST = (0.3, 0.8)
NOISE = 0.2  # of a picture's own spread
HELD_OUT = 0.25  # of each photograph's width


def _letter(font: str, letter: str) -> Tensor:
    """Ink from 0 to 1, (DRAWN, DRAWN)."""
    face = ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", font)), DRAWN * 4 // 5)
    ink = Image.new("L", (DRAWN, DRAWN))
    ImageDraw.Draw(ink).text((DRAWN / 2, DRAWN / 2), letter, fill=255, font=face, anchor="mm")
    return torch.frombuffer(bytearray(ink.tobytes()), dtype=torch.uint8).view(DRAWN, DRAWN).float() / 255


@cache
def _alphabet() -> Tensor:
    """(fonts, letters, DRAWN, DRAWN)"""
    return torch.stack([torch.stack([_letter(font, letter) for letter in LETTERS]) for font in FONTS])


@cache
def _photographs() -> list[Tensor]:
    """Grey from 0 to 1, at half their size."""
    from sklearn.datasets import load_sample_images

    grey = [torch.tensor(picture).float().mean(2) / 255 for picture in load_sample_images().images]
    return [F.avg_pool2d(picture[None, None], 2)[0, 0] for picture in grey]


def _behind(count: int, held_out: bool, dice: torch.Generator) -> Tensor:
    """Pieces of the photographs, (count, WHOLE, WHOLE)."""
    parts = []
    for number, photograph in enumerate(_photographs()):
        border = int(photograph.shape[1] * (1 - HELD_OUT))
        part = photograph[:, border:] if held_out else photograph[:, :border]
        pieces = part.unfold(0, WHOLE, 1).unfold(1, WHOLE, 1).reshape(-1, WHOLE, WHOLE)
        own = count // 2 if number else count - count // 2
        parts.append(pieces[torch.randint(len(pieces), (own,), generator=dice)])
    return torch.cat(parts)[torch.randperm(count, generator=dice)]


def _spread(count: int, most: float, dice: torch.Generator) -> Tensor:
    return (2 * torch.rand(count, generator=dice) - 1) * most


def letters(count: int, held_out: bool) -> tuple[Tensor, Tensor]:
    """Pictures (count, WHOLE, WHOLE), without noise, and their classes (count,)."""
    dice = torch.Generator().manual_seed(2026 + held_out)
    classes = torch.randint(len(LETTERS), (count,), generator=dice)
    ink = _alphabet()[torch.randint(len(FONTS), (count,), generator=dice), classes][:, None]
    angle, shear = _spread(count, LARGEST_ANGLE, dice), _spread(count, LARGEST_SHEAR, dice)
    scale = 1.0 + _spread(count, 0.2, dice)
    rows = [
        torch.stack([angle.cos() / scale, (shear - angle.sin()) / scale, _spread(count, LARGEST_SHIFT, dice)], 1),
        torch.stack([angle.sin() / scale, angle.cos() / scale, _spread(count, LARGEST_SHIFT, dice)], 1),
    ]
    places = F.affine_grid(torch.stack(rows, 1), [count, 1, 2 * WHOLE, 2 * WHOLE], align_corners=False)
    mask = F.avg_pool2d(F.grid_sample(ink, places, align_corners=False), 2)[:, 0]
    behind = _behind(count, held_out, dice)
    low, high = CONTRAST
    size = low + (high - low) * torch.rand(count, generator=dice)
    sign = (0.5 - behind.mean((1, 2)) + 0.2 * torch.randn(count, generator=dice)).sign()
    return (behind + (sign * size)[:, None, None] * mask - 0.4) / 0.3, classes


def cut(pictures: Tensor, dice: torch.Generator) -> Tensor:
    """Each out of its whole at a random place, with noise: (B, 1, SIDE, SIDE)."""
    count = len(pictures)
    down, right = torch.randint(2 * MARGIN + 1, (2, count), generator=dice)
    found = pictures.unfold(1, SIDE, 1).unfold(2, SIDE, 1)[torch.arange(count), down, right]
    return (found + NOISE * torch.randn(found.shape, generator=dice))[:, None]
