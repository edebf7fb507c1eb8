# SPDX-License-Identifier: Apache-2.0
"""Small data of the kinds that programs look for in files, made at the places that a table names.

pictures:FOLDER:CLASSES:COUNT:SIZE   a folder a class, COUNT pictures each, SIZE x SIZE
flat:FOLDER:COUNT:SIZE               COUNT pictures in one folder
words:FOLDER:COUNT                   train.txt, valid.txt and test.txt of COUNT, COUNT/10 and COUNT/10 words
text:FILE:COUNT                      COUNT characters of prose
copy:FROM:TO                         a file or a folder beside the programs
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

VOCABULARY = 200


def make(what: str, folder: Path, programs: Path) -> None:
    """Make what a line of the table says, in the program's folder."""
    kind, *rest = what.split(":")
    if kind == "copy":
        source, target = programs / rest[0], folder / rest[1]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, dirs_exist_ok=True) if source.is_dir() else shutil.copy(source, target)
        return
    KINDS[kind](folder / rest[0], *map(int, rest[1:]))


def pictures(folder: Path, classes: int, count: int, size: int) -> None:
    """A folder a class."""
    for number in range(classes):
        flat(folder / f"class{number}", count, size, number)


def flat(folder: Path, count: int, size: int, number: int = 0) -> None:
    """Pictures of one class: its own colours, and noise."""
    import numpy
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    own = numpy.random.RandomState(number).uniform(0, 255, (size, size, 3))
    draw = numpy.random.RandomState(1000 + number)
    for each in range(count):
        noisy = 0.5 * own + 0.5 * draw.uniform(0, 255, own.shape)
        Image.fromarray(noisy.astype(numpy.uint8)).save(folder / f"{each:04d}.png")


def prose(count: int, seed: int) -> list[str]:
    """Words of which each is mostly followed by the same one."""
    draw = random.Random(seed)
    words = [0]
    for _ in range(count - 1):
        words.append((3 * words[-1] + 1) % VOCABULARY if draw.random() < 0.7 else draw.randrange(VOCABULARY))
    return [f"w{word}" for word in words]


def words(folder: Path, count: int) -> None:
    """Three files of lines of ten words."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, much) in enumerate((("train", count), ("valid", count // 10), ("test", count // 10))):
        found = prose(much, seed)
        lines = [" ".join(found[first : first + 10]) for first in range(0, much, 10)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def text(file: Path, count: int) -> None:
    """Prose of so many characters."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(" ".join(prose(count, 0))[:count], encoding="utf-8")


KINDS: dict[str, Callable[..., None]] = {"pictures": pictures, "flat": flat, "words": words, "text": text}
