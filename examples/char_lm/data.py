# SPDX-License-Identifier: Apache-2.0
"""Text to learn from: the source of Python's own standard library, which every machine has.

Whole files are held out for validation, so nothing the model is judged on was seen in training.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset

# Printable ASCII and the newline; every other character becomes UNKNOWN.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
UNKNOWN = len(ALPHABET)
VOCABULARY = len(ALPHABET) + 1

# Tests repeat themselves, and these folders and files are tables rather than text.
SKIPPED_PARTS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "lib-dynload",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
SKIPPED_PREFIXES = ("_sysconfigdata", "test_")
LONGEST_FILE = 200_000  # bytes; longer ones are generated tables or one program repeated
LEAST_TEXT = 2_000_000  # characters; with less, the run would prove nothing
HELD_OUT = 25  # one file in so many is for validation


class NoText(RuntimeError):
    """Raised when this Python came without the source of its standard library."""


@dataclass(frozen=True)
class Corpus:
    """Two long tensors of character numbers (uint8, one dimension)."""

    train: torch.Tensor  # (characters,)
    validation: torch.Tensor  # (characters,)


def library_files(root: Path) -> list[Path]:
    """The library's readable sources, in an order that no file system can change."""
    found = []
    for folder, subfolders, names in os.walk(root):
        # Pruned here: site-packages can be a hundred times larger than the library.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_PARTS]
        found += [Path(folder, name) for name in names if _is_wanted(Path(folder, name))]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_wanted(path: Path) -> bool:
    if path.suffix != ".py" or path.name.startswith(SKIPPED_PREFIXES):
        return False
    return path.is_file() and path.stat().st_size <= LONGEST_FILE


def encode(text: str) -> torch.Tensor:
    """Text as character numbers. Tabs count as four spaces, foreign characters as UNKNOWN."""
    plain = text.replace("\r\n", "\n").expandtabs(4) or "\n"
    codes = torch.frombuffer(bytearray(plain.encode("utf-32-le")), dtype=torch.int32)
    table = torch.full((256,), UNKNOWN, dtype=torch.uint8)
    table[[ord(character) for character in ALPHABET]] = torch.arange(UNKNOWN, dtype=torch.uint8)
    return table[codes.clamp(max=255)]


def decode(numbers: torch.Tensor) -> str:
    """Character numbers as text; the replacement sign stands for UNKNOWN."""
    return "".join((ALPHABET + "\ufffd")[number] for number in numbers.tolist())


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library at `root` (default: the running Python's) into two tensors."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train, validation = [], []
    for path in library_files(root):
        name = path.relative_to(root).as_posix()
        # A hash of the name decides, so a file stays on its side when others come and go.
        part = validation if zlib.crc32(name.encode()) % HELD_OUT == 0 else train
        part.append(encode(path.read_text(encoding="utf-8", errors="replace")))
    _check_enough(root, train, validation)
    return Corpus(torch.cat(train), torch.cat(validation))


def _check_enough(root: Path, train: list[torch.Tensor], validation: list[torch.Tensor]) -> None:
    found = sum(len(text) for text in train)
    if found < LEAST_TEXT or not validation:
        raise NoText(
            f"found {found:,} characters of Python source under {root}, need {LEAST_TEXT:,}; "
            "this Python was installed without its library's sources (a zipped or stripped "
            "build): use a full Python, or pass another folder of .py files with --text"
        )


class Chunks(Dataset):
    """Item i is the i-th piece of `length` characters and the same piece one character later.

    Each piece starts with `context` characters that only feed the model; the loss leaves them
    out, so every prediction that counts sees a full window.
    """

    def __init__(self, text: torch.Tensor, length: int, context: int) -> None:
        self.length = length + context
        self.count = (len(text) - self.length - 1) // length
        # A view: overlapping windows cost no memory.
        self.windows = text[: self.count * length + context + 1].unfold(
            0, self.length + 1, length
        )  # (count, context + length + 1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.windows[index].long()
        return window[:-1], window[1:]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole minibatch at once: many times faster than one item after another."""
        windows = self.windows[torch.as_tensor(indices)].long()
        return windows[:, :-1], windows[:, 1:]


def keep_batch(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The collate function that goes with `Chunks.__getitems__`: it is a minibatch already."""
    return batch
