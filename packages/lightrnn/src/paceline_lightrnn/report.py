# SPDX-License-Identifier: Apache-2.0
"""The content of a report of a training: numbers, words and samples, without the page."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline import CheckpointError
from paceline_lightrnn import generate
from paceline_lightrnn.building import Model, load_model
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.preparing import VOCABULARY
from paceline_lightrnn.scoring import place
from paceline_lightrnn.sizes import Sizes, sizes_of
from paceline_lightrnn.table import EMPTY, WordTable
from paceline_lightrnn.training import HISTORY
from paceline_lightrnn.vocabulary import Vocabulary

CELLS = 64
"""Most cells of the heat map, in either direction."""


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        model: on the CPU.
        vocabulary: its words.
        history: a row for each round; see `train`.
        workers: number of workers.
        rule: of the workers.
    """

    model: Model
    vocabulary: Vocabulary
    history: list[dict[str, Any]]
    workers: int
    rule: str

    @classmethod
    def load(cls, folder: Path) -> Trained:
        """Read it; CheckpointError if a file is missing or damaged."""
        model, vocabulary = load_model(folder), Vocabulary.load(folder / VOCABULARY)
        check_fits(model, vocabulary, folder)
        try:
            about = json.loads((folder / HISTORY).read_text(encoding="utf-8"))
            return cls(model, vocabulary, list(about["rounds"]), int(about["workers"]), str(about["rule"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot read {folder / HISTORY}: {error}; has the training ended?") from error

    @property
    def sizes(self) -> Sizes:
        """Bytes of the model."""
        return sizes_of(self.model)

    @property
    def full(self) -> Sizes:
        """Bytes of a model with input and output vectors for each word and the same recurrent network."""
        number = next(self.model.parameters()).element_size()
        vectors = len(self.vocabulary) * self.model.dimension * number
        return Sizes(vectors, vectors + len(self.vocabulary) * number, self.sizes.recurrent)


def check_fits(model: Model, vocabulary: Vocabulary, folder: Path) -> None:
    """Raise CheckpointError if model and vocabulary are of different trainings."""
    if model.words != len(vocabulary):
        raise CheckpointError(
            f"the model in {folder} has {model.words} words and the vocabulary {len(vocabulary)}: they are of two "
            "trainings; train again"
        )


def lines_of(
    table: WordTable, vocabulary: Vocabulary, axis: str, lines: int = 12, words: int = 14
) -> list[tuple[int, int, list[str]]]:
    """The rows (or columns) with the most frequent words: number, total count, and most frequent words.

    Args:
        table: the table.
        vocabulary: its words.
        axis: "row" or "column".
        lines: number of rows or columns.
        words: number of words of each.
    """
    place_of = (table.row if axis == "row" else table.column).cpu()
    counts = torch.from_numpy(vocabulary.counts)
    total = torch.zeros(table.rows if axis == "row" else table.columns, dtype=torch.int64).index_add_(
        0, place_of, counts
    )
    found = []
    for line in torch.argsort(total, descending=True, stable=True)[:lines].tolist():
        members = torch.nonzero(place_of == line)[:, 0]
        best = members[torch.argsort(counts[members], descending=True, stable=True)][:words].tolist()
        found.append((line, int(total[line]), [vocabulary.words[k] for k in best]))
    return found


def heat(table: WordTable, vocabulary: Vocabulary, most: int = CELLS) -> NDArray[np.float64]:
    """log10 of the mean count of a word in each part of the table; nan where there is none.

    Rows and columns are sorted by their words' counts; neighbours share a cell if there are more than `most`. Shape (up
    to `most`, up to `most`).
    """
    word = table.word.cpu().numpy()
    there = word != EMPTY
    counts = np.where(there, vocabulary.counts[np.where(there, word, 0)], 0).astype(np.float64)
    rows, columns = np.argsort(-counts.sum(1), kind="stable"), np.argsort(-counts.sum(0), kind="stable")
    sums, number = (_fold(x[rows][:, columns].astype(np.float64), most) for x in (counts, there))
    with np.errstate(divide="ignore", invalid="ignore"):
        found: NDArray[np.float64] = np.where(number > 0, np.log10(np.maximum(sums / number, 0.5)), np.nan)
    return found


def _fold(values: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    for axis in (0, 1):
        edges = np.linspace(0, values.shape[axis], min(most, values.shape[axis]) + 1).astype(int)[:-1]
        values = np.add.reduceat(values, edges, axis=axis)
    return values


def samples(model: Model, vocabulary: Vocabulary, number: int = 3, words: int = 60, seed: int = 0) -> list[str]:
    """Texts drawn from the model at temperature 0.8."""
    device = place(model)
    drawn = generate.sample(
        model,
        model.begin(number, vocabulary.end),
        words,
        temperature=0.8,
        generator=torch.Generator(device).manual_seed(seed),
    )
    return [vocabulary.text(row) for row in drawn.tolist()]


def falls(history: list[dict[str, Any]]) -> list[str]:
    """Warnings about re-allocations that did not help."""
    found = []
    for before, after in itertools.pairwise(history):
        if "cost_after" not in before:
            continue
        if not before["cost_after"] < before["cost_before"]:
            found.append(f"The re-allocation after round {before['round']} found no cheaper table.")
        if after["perplexity"] > before["perplexity"] or math.isnan(after["perplexity"]):
            found.append(f"Round {after['round']} ended with a higher perplexity than round {before['round']}.")
    return found


def is_light(model: Model) -> bool:
    """Whether it has a table."""
    return isinstance(model, LightRNN)
