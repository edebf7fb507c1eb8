# SPDX-License-Identifier: Apache-2.0
"""The groups of a quantiser: numbers that share a level.

Groups are the rows of matrices, so that arithmetic runs over many at once. A group never spans two tensors, whose
gradients may differ by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.rules.codec.layout import Layout, Matrix


def columns(layout: Layout, shortest: int, longest: int) -> tuple[Matrix, ...]:
    """A group for each row of the layout.

    Rows of fewer than `shortest` numbers are merged, whole rows at a time; the rest at a tensor's end joins the last
    group. A row of more than `longest` numbers is cut into groups of `longest` and a rest.
    """
    return _joined(part for matrix in layout.matrices for part in _columns(matrix, shortest, longest))


def _columns(matrix: Matrix, shortest: int, longest: int) -> Iterable[Matrix]:
    offset, rows, length = matrix.offset, matrix.rows, matrix.columns
    if length > longest:
        for row in range(rows):
            yield from _blocks(Matrix(offset + row * length, 1, length), longest)
        return
    together = -(-shortest // length)
    groups = rows // together
    if groups * together == rows:
        yield Matrix(offset, groups, together * length)
        return
    whole = max(groups - 1, 0)  # the last one takes the rest
    if whole:
        yield Matrix(offset, whole, together * length)
    yield Matrix(offset + whole * together * length, 1, (rows - whole * together) * length)


def blocks(layout: Layout, length: int) -> tuple[Matrix, ...]:
    """Groups of `length` consecutive numbers of a tensor, across its rows; the last may be shorter.

    In a cut layout the rest of a cut row counts as a tensor.
    """
    return _joined(part for matrix in layout.matrices for part in _blocks(matrix, length))


def _blocks(matrix: Matrix, length: int) -> Iterable[Matrix]:
    whole = matrix.numel // length
    if whole:
        yield Matrix(matrix.offset, whole, length)
    rest = matrix.numel - whole * length
    if rest:
        yield Matrix(matrix.end - rest, 1, rest)


def _joined(matrices: Iterable[Matrix]) -> tuple[Matrix, ...]:
    """Merge neighbours of equal row length: fewer matrices mean fewer operations."""
    joined: list[Matrix] = []
    for matrix in matrices:
        if joined and joined[-1].columns == matrix.columns and joined[-1].end == matrix.offset:
            last = joined.pop()
            matrix = Matrix(last.offset, last.rows + matrix.rows, last.columns)
        joined.append(matrix)
    return tuple(joined)
