# SPDX-License-Identifier: Apache-2.0
"""Files that appear in one piece, and their checksums."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


def beside(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(path.name + ".new")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Inside, the file to write; afterwards it is `path`. Its folder is made; after an error an older file is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    yield beside(path)
    os.replace(beside(path), path)


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 that appears in one piece; line ends stay what they are."""
    with whole(path) as new, new.open("w", encoding="utf-8", newline="") as file:
        file.write(text)


def sha256(path: Path) -> str:
    """The file's sum, in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
