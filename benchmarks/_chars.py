# SPDX-License-Identifier: Apache-2.0
"""Guess the next character of Python's own library from the last twelve: the language model of `blocks.py`.

Whole files are held out for validation. A sample is a place of the text: its character and those before it. Samples are
taken in a permutation of all places, minibatch after minibatch, and none twice before all were taken once. N workers
take the next N minibatches in each step, so every N sees the same samples in the same order.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

CONTEXT = 12
KNOWN = "\n" + "".join(chr(code) for code in range(32, 127))
VOCABULARY = len(KNOWN) + 1
"""Printable ASCII, the newline, and one number for all other characters."""
LEFT_OUT = {"encodings", "idle_test", "lib-dynload", "pydoc_data", "site-packages", "dist-packages", "test", "tests"}
LONGEST = 200_000
"""Bytes of a file that is taken; longer ones are tables."""
HELD_OUT = 25
"""One file in so many is for validation."""
JUDGED = 1 << 18
"""Places of the validation part that the loss is measured at, evenly spread."""
AT_A_TIME = 256
"""Minibatches that are drawn at once, at least one step's."""


@dataclass(frozen=True)
class Text:
    """Numbers of characters, each shape (characters,), dtype uint8."""

    train: Tensor
    validation: Tensor


# ---- The text


def text(folder: Path) -> Text:
    """The text, made once and kept in `folder`."""
    kept = folder / "text.npz"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"text-{os.getpid()}.npz"
        np.savez(made, **_read())
        made.replace(kept)
    with np.load(kept) as parts:
        return Text(torch.from_numpy(parts["train"]), torch.from_numpy(parts["validation"]))


def _read() -> dict[str, np.ndarray]:
    root = Path(sysconfig.get_paths()["stdlib"])
    sides: dict[str, list[np.ndarray]] = {"train": [], "validation": []}
    for path in _files(root):
        # A hash of the name decides, so that a file stays where it is when others come and go.
        held_out = zlib.crc32(path.relative_to(root).as_posix().encode()) % HELD_OUT == 0
        sides["validation" if held_out else "train"].append(_numbers(path.read_text("utf-8", "replace")))
    if not all(sides.values()):
        raise SystemExit(f"no Python files under {root}; use a Python that has its library's sources")
    return {name: np.concatenate(parts) for name, parts in sides.items()}


def _files(root: Path) -> list[Path]:
    """In an order that no file system can change."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]  # not walked at all
        found += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfig")]
    return sorted(path for path in found if path.stat().st_size <= LONGEST)


def _numbers(plain: str) -> np.ndarray:
    codes = np.frombuffer(plain.expandtabs(4).encode("utf-32-le"), dtype=np.uint32)
    table = np.full(129, VOCABULARY - 1, dtype=np.uint8)
    table[[ord(character) for character in KNOWN]] = np.arange(len(KNOWN), dtype=np.uint8)
    return table[np.minimum(codes, 128)]


# ---- Samples


def windows(characters: Tensor) -> Tensor:
    """All samples, a view of shape (places, CONTEXT + 1); the last column is what is to be guessed."""
    return characters.unfold(0, CONTEXT + 1, 1)


def split(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Characters before, shape (..., CONTEXT), and the character, shape (...)."""
    return samples[..., :-1].int(), samples[..., -1].long()


def batches(characters: Tensor, workers: int, steps: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step the workers' minibatches: shapes (N, size, CONTEXT) and (N, size).

    Args:
        characters: of the training part.
        workers: N.
        steps: of each worker.
        size: samples of a minibatch.
        seed: of the permutation.
    """
    samples = windows(characters)
    at_once = max(1, AT_A_TIME // workers)
    places = _places(len(samples), at_once * workers * size, seed)
    for first in range(0, steps, at_once):
        drawn = samples[next(places).to(characters.device)].view(at_once, workers, size, CONTEXT + 1)
        before, character = split(drawn)
        yield from zip(before[: steps - first], character[: steps - first], strict=True)


def _places(count: int, at_once: int, seed: int) -> Iterator[Tensor]:
    """Pieces of one permutation after another."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.int32)
    while True:
        while len(left) < at_once:
            left = torch.cat([left, torch.randperm(count, generator=generator, dtype=torch.int32)])
        piece, left = left[:at_once], left[at_once:]
        yield piece


# ---- The model


class Perceptron(nn.Module):
    """Embeddings of the last characters, one hidden layer, logits of the next.

    Args:
        hidden: its width.
        embedding: numbers for a character.
    """

    def __init__(self, hidden: int, embedding: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, embedding)
        self.layers = nn.Sequential(nn.Linear(CONTEXT * embedding, hidden), nn.ReLU(), nn.Linear(hidden, VOCABULARY))

    def forward(self, before: Tensor) -> Tensor:
        """Logits, shape (batch, VOCABULARY), of characters, shape (batch, CONTEXT)."""
        logits: Tensor = self.layers(self.embedding(before).flatten(1))
        return logits


def loss_of(model: nn.Module, before: Tensor, character: Tensor) -> Tensor:
    """Cross-entropy of a minibatch, in nats."""
    return nn.functional.cross_entropy(model(before), character)


@torch.no_grad()
def judged(model: nn.Module, parameters: Mapping[str, Tensor], characters: Tensor) -> float:
    """Mean cross-entropy, in nats, on the validation part."""
    samples = windows(characters)
    samples = samples[:: max(1, len(samples) // JUDGED)]
    total = 0.0
    for piece in samples.split(1 << 13):
        before, character = split(piece)
        logits = functional_call(model, dict(parameters), (before,))
        total += float(nn.functional.cross_entropy(logits, character, reduction="sum"))
    return total / len(samples)
