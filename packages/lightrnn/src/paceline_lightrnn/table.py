# SPDX-License-Identifier: Apache-2.0
"""The table of LightRNN: each word is a cell; words of a row share one vector, words of a column the other.

Source: Li, Qin, Yang, Hu, Liu, "LightRNN: Memory and Computation-Efficient Recurrent Neural Networks", NIPS 2016,
section 3.1.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline import CheckpointError, MismatchError
from paceline_lightrnn import files

FORMAT = "paceline word table 1"
EMPTY = -1
"""In `WordTable.word`: no word has this cell."""


class WordTable:
    """Which word has which cell. It is never changed: a re-allocation makes another one.

    Args:
        cells: shape (V,), integers; `row * columns + column` of each word, all different.
        rows: of the table.
        columns: of the table; `rows * columns` is at least V.

    Attributes:
        words: V, the size of the vocabulary.
        rows: R.
        columns: C.
        cells: shape (V,), int64.
        word: shape (R, C), int64: the word of each cell, `EMPTY` where there is none.
        row: shape (V,), int64.
        column: shape (V,), int64.
        full: whether every cell has a word.

    Raises:
        MismatchError: two words have the same cell, or one has a cell outside of the table.
    """

    def __init__(self, cells: Tensor, rows: int, columns: int) -> None:
        cells = torch.as_tensor(cells).to(torch.int64)
        if cells.ndim != 1 or cells.numel() == 0:
            raise MismatchError(f"a table has one cell for each word; got cells of shape {tuple(cells.shape)}")
        self.words, self.rows, self.columns, self.cells = cells.numel(), rows, columns, cells
        if self.words > rows * columns:
            raise MismatchError(
                f"{self.words} words do not fit into {rows} rows x {columns} columns; {_shape(self.words)} would do"
            )
        low, high = int(cells.min()), int(cells.max())
        if low < 0 or high >= rows * columns:
            raise MismatchError(f"cells are 0 to {rows * columns - 1}, got {low} to {high}")
        word = torch.full((rows * columns,), EMPTY, dtype=torch.int64, device=cells.device)
        word[cells] = torch.arange(self.words, device=cells.device)
        self.full = self.words == rows * columns
        taken = int((word != EMPTY).sum())
        if taken != self.words:
            raise MismatchError(f"{self.words} words have {taken} different cells: two words share one")
        self.word = word.view(rows, columns)
        self.row, self.column = cells // columns, cells % columns

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WordTable):
            return NotImplemented
        same = (self.rows, self.columns, self.words) == (other.rows, other.columns, other.words)
        return same and torch.equal(self.cells.cpu(), other.cells.cpu())

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: object) -> WordTable:
        return self  # it is immutable

    def __repr__(self) -> str:
        return f"WordTable({self.words} words, {self.rows} x {self.columns})"

    def with_cells(self, cells: Tensor) -> WordTable:
        """A table of the same shape with other cells."""
        return WordTable(cells.to(self.cells.device), self.rows, self.columns)

    def to(self, device: torch.device | str) -> WordTable:
        """This table on another device."""
        return self if self.cells.device == torch.device(device) else WordTable(self.cells.to(device), *self.shape)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    # -- ways to make one -------------------------------------------------------------------------

    @classmethod
    def random(cls, words: int, rows: int | None = None, columns: int | None = None, seed: int = 0) -> WordTable:
        """Every word in a random cell, as in the paper; by default the smallest square that fits."""
        shape = _shape(words, rows, columns)
        cells = torch.randperm(shape[0] * shape[1], generator=torch.Generator().manual_seed(seed))[:words]
        return cls(cells, *shape)

    @classmethod
    def by_frequency(cls, counts: Tensor, rows: int | None = None, columns: int | None = None) -> WordTable:
        """The most frequent words fill the first row, the next the second, and so on.

        Args:
            counts: shape (V,): of each word; words of equal count keep their order.
            rows: of the table.
            columns: of the table.
        """
        counts = torch.as_tensor(counts)
        cells = torch.empty(counts.numel(), dtype=torch.int64)
        cells[torch.argsort(counts, descending=True, stable=True)] = torch.arange(counts.numel())
        return cls(cells, *_shape(counts.numel(), rows, columns))

    @classmethod
    def from_vectors(cls, vectors: Tensor, rows: int | None = None, columns: int | None = None) -> WordTable:
        """Words with similar vectors share a row, or a column.

        The words are sorted along the vectors' first principal component and cut into rows; each row is sorted along
        the second, which aligns the columns.

        Args:
            vectors: shape (V, d), such as embeddings of another model; finite.
            rows: of the table.
            columns: of the table.
        """
        vectors = torch.as_tensor(vectors).float()
        if vectors.ndim != 2 or not bool(torch.isfinite(vectors).all()):
            raise MismatchError(f"vectors have shape (words, d) and are finite; got {tuple(vectors.shape)}")
        shape = _shape(vectors.shape[0], rows, columns)
        first, second = _principal(vectors)
        order = torch.argsort(first, stable=True)
        cells = torch.empty(vectors.shape[0], dtype=torch.int64)
        for row, words in enumerate(torch.split(order, shape[1])):
            cells[words[torch.argsort(second[words], stable=True)]] = row * shape[1] + torch.arange(words.numel())
        return cls(cells, *shape)

    # -- beside the model -------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write it to the file `path` (safetensors), atomically."""
        path = Path(path)
        about = {"format": FORMAT, "rows": str(self.rows), "columns": str(self.columns)}
        with files.whole(Path(path)) as new:
            save_file({"cells": self.cells.cpu().contiguous()}, new, about)

    @classmethod
    def load(cls, path: str | Path) -> WordTable:
        """Read what `save` wrote; CheckpointError for anything else."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                if about.get("format") != FORMAT:
                    raise CheckpointError(f"{path} is no word table: its format is {json.dumps(about.get('format'))}")
                return cls(file.get_tensor("cells"), int(about["rows"]), int(about["columns"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"cannot read the word table {path}: {error}; save it again") from error


def _shape(words: int, rows: int | None = None, columns: int | None = None) -> tuple[int, int]:
    """The table's shape: as square as possible, without an empty row."""
    if words < 1 or (rows is not None and rows < 1) or (columns is not None and columns < 1):
        raise MismatchError(f"a table has words, rows and columns; got {words}, {rows} and {columns}")
    if rows is None and columns is None:
        columns = math.isqrt(words - 1) + 1
    if rows is None:
        assert columns is not None
        return -(-words // columns), columns
    return rows, columns if columns is not None else -(-words // rows)


def _principal(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The coordinates, shape (V,) each, along the first two principal components."""
    centred = vectors - vectors.mean(0)
    width = centred.shape[1]
    _, axes = torch.linalg.eigh(centred.T @ centred)
    first = centred @ axes[:, -1]
    return first, centred @ axes[:, -2] if width > 1 else first
