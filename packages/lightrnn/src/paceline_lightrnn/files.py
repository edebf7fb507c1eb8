# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files, and checksums."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


def beside(path: Path) -> Path:
    """The temporary path of a file that is being written."""
    return path.with_name(path.name + ".new")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Context with a temporary path to write; at its end it is renamed to `path`. After an error an old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    yield beside(path)
    os.replace(beside(path), path)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically; line ends are kept."""
    with whole(path) as new, new.open("w", encoding="utf-8", newline="") as file:
        file.write(text)


def sha256(path: Path) -> str:
    """The file's sum, in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
