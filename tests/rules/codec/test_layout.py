# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a flat tensor are, and which of them share a level."""

from __future__ import annotations

import pytest

from paceline.rules.codec import Layout, Matrix
from paceline.rules.codec.groups import blocks, columns

SHAPES: list[list[tuple[int, ...]]] = [
    [],
    [(1,)],
    [(3, 4)],
    [(5,), (2, 3), (), (2, 2, 2)],
    [(0,), (4, 1), (3, 0), (1, 5)],
]


def covers(matrices: tuple[Matrix, ...], numel: int) -> bool:
    """Without a gap, in order, nothing empty."""
    place = 0
    for matrix in matrices:
        if matrix.offset != place or matrix.rows < 1 or matrix.columns < 1:
            return False
        place = matrix.end
    return place == numel


def rows_of(layout: Layout, begin: int = 0) -> list[tuple[int, int]]:
    """[first, last) of every row, counted from `-begin`."""
    return [
        (begin + m.offset + r * m.columns, begin + m.offset + (r + 1) * m.columns)
        for m in layout.matrices
        for r in range(m.rows)
    ]


def test_tensors_are_matrices_of_rows() -> None:
    layout = Layout.of([(4, 3, 2), (7,), (), (0, 5), (2, 1)])
    assert layout.matrices == (Matrix(0, 4, 6), Matrix(24, 1, 7), Matrix(31, 1, 1), Matrix(32, 2, 1))
    assert layout.numel == 34
    assert Layout.vector(5).matrices == (Matrix(0, 1, 5),)
    assert Layout.vector(0).matrices == () and Layout.vector(0).numel == 0


@pytest.mark.parametrize("shapes", SHAPES)
def test_a_cut_keeps_inner_rows_and_the_rest_of_cut_ones(shapes: list[tuple[int, ...]]) -> None:
    layout = Layout.of(shapes)
    for begin in range(layout.numel + 1):
        for end in range(begin, layout.numel + 1):
            part = layout.cut(begin, end)
            assert covers(part.matrices, end - begin)
            expected = [(max(a, begin), min(b, end)) for a, b in rows_of(layout) if max(a, begin) < min(b, end)]
            assert rows_of(part, begin) == expected
            assert len(part.matrices) <= 3 * len(layout.matrices)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("shortest", [1, 2, 3, 7])
def test_columns_are_whole_rows_long_enough(shapes: list[tuple[int, ...]], shortest: int) -> None:
    layout = Layout.of(shapes)
    groups = columns(layout, shortest, 100)
    assert covers(groups, layout.numel)
    starts = {begin for begin, _ in rows_of(layout)}
    tensors = {(m.offset, m.end) for m in layout.matrices}
    for begin, end in rows_of(Layout(groups)):
        assert begin in starts, "a group begins inside a row"
        assert any(a <= begin and end <= b for a, b in tensors), "a group spans two tensors"
        assert end - begin >= shortest or (begin, end) in tensors


def test_columns_by_hand() -> None:
    assert columns(Layout.of([(5, 3)]), 6, 100) == (Matrix(0, 1, 6), Matrix(6, 1, 9))
    assert columns(Layout.of([(7, 3)]), 6, 100) == (Matrix(0, 2, 6), Matrix(12, 1, 9))
    assert columns(Layout.of([(4, 3)]), 6, 100) == (Matrix(0, 2, 6),)
    assert columns(Layout.of([(2, 3)]), 64, 100) == (Matrix(0, 1, 6),)
    assert columns(Layout.of([(2, 5)]), 1, 2) == (Matrix(0, 2, 2), Matrix(4, 1, 1), Matrix(5, 2, 2), Matrix(9, 1, 1))
    assert columns(Layout.of([(2, 8), (8,), (3, 8)]), 8, 64) == (Matrix(0, 6, 8),)


@pytest.mark.parametrize("shapes", SHAPES)
def test_blocks_stay_inside_a_tensor(shapes: list[tuple[int, ...]]) -> None:
    layout = Layout.of(shapes)
    groups = blocks(layout, 4)
    assert covers(groups, layout.numel)
    tensors = [(m.offset, m.end) for m in layout.matrices]
    for begin, end in rows_of(Layout(groups)):
        (inside,) = [(a, b) for a, b in tensors if a <= begin and end <= b]
        assert end - begin == min(4, inside[1] - begin)
