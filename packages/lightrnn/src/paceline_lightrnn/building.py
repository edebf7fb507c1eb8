# SPDX-License-Identifier: Apache-2.0
"""Builds a model from settings, or loads one from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import CheckpointError, DataError
from paceline_lightrnn import baseline
from paceline_lightrnn.baseline import Output, WordRNN
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.settings import Shape
from paceline_lightrnn.sizes import Sizes, light_sizes, sizes_of
from paceline_lightrnn.storage import ABOUT
from paceline_lightrnn.table import WordTable
from paceline_lightrnn.text import Text
from paceline_lightrnn.vocabulary import Vocabulary

Model = LightRNN | WordRNN


def build(shape: Shape, vocabulary: Vocabulary, seed: int = 0) -> Model:
    """A new model; the seed determines its weights and a random table.

    Raises:
        UnsupportedError: a setting is invalid, or the softmax over all words does not fit into memory.
        DataError: the file of vectors cannot be read.
    """
    choices = {"layers": shape.layers, "cell": shape.cell, "dropout": shape.dropout, "tied": shape.tied}
    torch.manual_seed(seed)
    if shape.output == "lightrnn":
        return LightRNN(first_table(shape.table, vocabulary, seed), shape.dimension, **choices)  # type: ignore[arg-type]
    return WordRNN(len(vocabulary), shape.dimension, output=shape.output, **choices)  # type: ignore[arg-type]


def load_model(folder: Path) -> Model:
    """The model of a folder, of either kind; CheckpointError if there is none."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} holds no trained model: {error}; give the folder of `paceline lightrnn train --out`"
        ) from error
    if isinstance(about, dict) and about.get("format") == baseline.FORMAT:
        return WordRNN.load(folder)
    return LightRNN.load(folder)


def parameter_bytes(words: int, dimension: int, *, output: Output = "light", **choices: Any) -> Sizes:
    """The size of a model, without allocating it.

    Args:
        words: V.
        dimension: d.
        output: "light" for a LightRNN with a table as square as can be; otherwise the output of a `WordRNN`.
        choices: `layers`, `cell`, `tied` as the model takes them.
    """
    if output == "light":
        return light_sizes(words, dimension, **choices)
    with torch.device("meta"):
        return sizes_of(WordRNN(words, dimension, output=output, **choices))


def first_table(how: str, vocabulary: Vocabulary, seed: int = 0) -> WordTable:
    """A table at random, by frequency, or from a file of vectors."""
    if how == "random":
        return WordTable.random(len(vocabulary), seed=seed)
    if how == "frequency":
        return WordTable.by_frequency(torch.from_numpy(vocabulary.counts))
    return WordTable.from_vectors(read_vectors(Path(how), vocabulary))


def read_vectors(path: Path, vocabulary: Vocabulary) -> Tensor:
    """Vectors as word2vec and GloVe write them as text: a word and its numbers a line, `.gz` or not.

    Returns:
        Shape (V, d), float32; words that the file lacks get the mean of its vectors.

    Raises:
        DataError: the file has another format, or none of the words.
    """
    found: dict[int, list[float]] = {}
    for number, (fields, _) in enumerate(Text([path], "space")):
        if number == 0 and len(fields) == 2 and all(field.isdecimal() for field in fields):
            continue  # the header: count and dimension
        word = vocabulary[fields[0].lower() if vocabulary.lower else fields[0]]
        if word == vocabulary.unknown:
            continue
        try:
            found[word] = [float(field) for field in fields[1:]]
        except ValueError as error:
            raise DataError(f"line {number + 1} of the vectors {path} is no word with its numbers: {error}") from error
    sizes = {len(row) for row in found.values()}
    if len(sizes) != 1 or 0 in sizes:
        what = "has none of the vocabulary's words" if not found else f"has vectors of {sorted(sizes)[:3]} numbers"
        raise DataError(f"the file of vectors {path} {what}; give one such as word2vec writes as text")
    rows = torch.tensor(list(found.values()))
    vectors = rows.mean(0).repeat(len(vocabulary), 1)
    vectors[torch.tensor(list(found))] = rows
    return vectors
