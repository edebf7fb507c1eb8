# SPDX-License-Identifier: Apache-2.0
"""Guess the next character of Python's own library from the last twelve: the language model of `blocks.py`.

Whole files are held out for validation. A sample is a place of the text: its character and those before it. Samples are
taken in a permutation of all places, minibatch after minibatch, and none twice before all were taken once. N workers
take the next N minibatches in each step, so every N sees the same samples in the same order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "char_lm"))

import torch
from _permutations import pieces
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call

from data import VOCABULARY, Corpus, load_corpus

CONTEXT = 12
TAKEN, JUDGED = (1 << 16, 1 << 12) if "--quick" in sys.argv else (None, 1 << 18)
"""Characters of the training part, None for all, and places of the validation part, evenly spread, to be judged at."""
AT_A_TIME = 256
"""Minibatches that are drawn at once, at least one step's."""


def text(folder: Path) -> Corpus:
    """The text of the example `char_lm`, read once and kept in `folder`."""
    kept = folder / "text.safetensors"
    if not kept.exists():
        corpus = load_corpus()
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"text-{os.getpid()}.safetensors"
        save_file({"train": corpus.train, "validation": corpus.validation}, made)
        made.replace(kept)
    return Corpus(**load_file(kept))


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
    samples = windows(characters[:TAKEN])
    at_once = max(1, AT_A_TIME // workers)
    places = pieces(len(samples), at_once * workers * size, seed)
    for first in range(0, steps, at_once):
        drawn = samples[next(places).to(characters.device)].view(at_once, workers, size, CONTEXT + 1)
        before, character = split(drawn)
        yield from zip(before[: steps - first], character[: steps - first], strict=True)


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
