# SPDX-License-Identifier: Apache-2.0
"""The data of the everyday programs, made from what Python and Matplotlib bring along, and kept in a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

Arrays = dict[str, np.ndarray]
SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
SIDE, DRAWN = 16, 48  # pixels
NOISE = 0.15


def kept(name: str, make: Callable[[], Arrays]) -> Arrays:
    """What `make` returns, from the folder if it is there."""
    path = Path(os.environ["EVERYDAY_DATA"]) / f"{name}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f".{os.getpid()}-{path.name}")
        np.savez(made, **make())  # type: ignore[arg-type]
        made.replace(path)
    with np.load(path) as found:
        return dict(found)


def sources() -> list[str]:
    """The files of Python's own library."""
    return [path.read_text("utf-8", "ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))]


def text() -> Arrays:
    """Its characters as numbers below 97; every twelfth file is held out."""

    def make() -> Arrays:
        numbers = np.zeros(256, np.uint8)
        numbers[10], numbers[32:127] = 1, np.arange(2, 97)
        files = [numbers[np.frombuffer(one.encode("ascii", "ignore"), np.uint8)] for one in sources()]
        held = np.concatenate(files[::12])
        return {"train": np.concatenate([one for k, one in enumerate(files) if k % 12]), "held_out": held}

    return kept("text", make)


def letters(count: int) -> Arrays:
    """Pictures `x` (count, SIDE, SIDE), float32, of letters and digits `y`, and a fifth as many held out."""

    def make() -> Arrays:
        dice, total = np.random.default_rng(7), count + count // 5
        paths = sorted(Path(matplotlib.get_data_path(), "fonts", "ttf").glob("DejaVuS*.ttf"))
        known = [path for path in paths if "Display" not in path.name]
        fonts = [ImageFont.truetype(str(path), size) for path in known for size in (26, 32)]
        x, y = np.empty((total, SIDE, SIDE), np.float32), dice.integers(0, len(SYMBOLS), total)
        for k in range(total):
            picture = Image.new("L", (DRAWN, DRAWN))
            font = fonts[dice.integers(len(fonts))]
            ImageDraw.Draw(picture).text((24, 24), SYMBOLS[y[k]], 255, font, anchor="mm")
            moved = tuple(int(one) for one in dice.integers(-4, 5, 2))
            picture = picture.rotate(dice.normal(0, 12), Image.Resampling.BILINEAR, translate=moved)
            x[k] = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32) / 255
        x += dice.normal(0, NOISE, x.shape).astype(np.float32)
        return {"x": x[:count], "y": y[:count], "held_x": x[count:], "held_y": y[count:]}

    return kept(f"letters-{count}", make)


def names() -> Arrays:
    """Pairs (part of the library, name that occurs in it), and how many of each there are."""

    def make() -> Arrays:
        number: dict[str, int] = {}
        parts = [part for one in sources() for part in re.split(r"\n(?=def |class )", one)]
        pairs = [
            (k, number.setdefault(name, len(number)))
            for k, part in enumerate(parts)
            for name in sorted(set(re.findall(r"[A-Za-z_]{3,}", part)))
        ]
        rows = np.random.default_rng(3).permutation(np.array(pairs, np.int64))
        cut = len(rows) // 10
        return {"train": rows[cut:], "held_out": rows[:cut], "sizes": np.array([len(parts), len(number)])}

    return kept("names", make)
