# SPDX-License-Identifier: Apache-2.0
"""The layout of a flat tensor: consecutive matrices of consecutive rows.

A parameter of shape (a, b, c, ..) is a matrix of a rows of b c .. numbers; a vector is one row. Codecs with levels a
row, or factors a matrix, read it. A layout can be cut anywhere: the rest of a cut row is a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Matrix:
    """`rows` rows of `columns` numbers, the first at `offset`.

    Attributes:
        offset: index of the first number in the flat tensor.
        rows: number of rows; 1 for a vector.
        columns: length of a row.
    """

    offset: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Numbers of the matrix."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """The index after the last number."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """Matrices that cover 0 .. numel without a gap, in order."""

    matrices: tuple[Matrix, ...]

    @property
    def numel(self) -> int:
        """Numbers of the flat tensor."""
        return self.matrices[-1].end if self.matrices else 0

    @classmethod
    def vector(cls, numel: int) -> Layout:
        """One row."""
        return cls((Matrix(0, 1, numel),) if numel else ())

    @classmethod
    def of(cls, shapes: Iterable[tuple[int, ...]]) -> Layout:
        """Tensors of these shapes end to end."""
        matrices, offset = [], 0
        for shape in shapes:
            numel = math.prod(shape)
            rows = shape[0] if len(shape) > 1 and numel else 1
            if numel:
                matrices.append(Matrix(offset, rows, numel // rows))
            offset += numel
        return cls(tuple(matrices))

    def cut(self, begin: int, end: int) -> Layout:
        """The layout of [begin, end), with offsets from `begin`."""
        matrices: list[Matrix] = []
        for matrix in self.matrices:
            low, high = max(begin, matrix.offset), min(end, matrix.end)
            if low < high:
                matrices += _rows(matrix, low, high, begin)
        return Layout(tuple(matrices))


def _rows(matrix: Matrix, low: int, high: int, origin: int) -> list[Matrix]:
    """The part of a matrix in [low, high): the rest of a cut row, whole rows, and the start of one."""
    length = matrix.columns
    first = min(high, matrix.offset + -(-(low - matrix.offset) // length) * length)
    last = max(first, matrix.offset + (high - matrix.offset) // length * length)
    matrices = []
    if low < first:
        matrices.append(Matrix(low - origin, 1, first - low))
    if first < last:
        matrices.append(Matrix(first - origin, (last - first) // length, length))
    if last < high:
        matrices.append(Matrix(last - origin, 1, high - last))
    return matrices
