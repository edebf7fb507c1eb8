# SPDX-License-Identifier: Apache-2.0
"""Tables of parameters: pairs of values in place of all combinations, and the rows that the fast tier runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which any two values of two columns stand together at least once; the same ones every time.

    Greedy: each row covers as many pairs as any that is left. The first rows have each value at least once.
    """
    numbers = [range(len(column)) for column in columns]
    rows = [tuple(k % len(column) for column in columns) for k in range(max(map(len, columns)))]
    left = {pair for row in product(*numbers) for pair in _pairs(row)}.difference(*map(_pairs, rows))
    while left:
        best = max(product(*numbers), key=lambda row: len(left & _pairs(row)))
        rows.append(best)
        left -= _pairs(best)
    return [tuple(column[k] for column, k in zip(columns, row, strict=True)) for row in rows]


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Each two places of a row with what stands there."""
    return set(combinations(enumerate(row), 2))


def rest_is_full(rows: Iterable[Any], fast: int) -> list[Any]:
    """The first `fast` rows as they are; the others run in `make test-all` only."""
    return [row if k < fast else _full(row) for k, row in enumerate(rows)]


def each_value_fast(*columns: Sequence[Any]) -> list[Any]:
    """:func:`pairwise`; the fast tier runs as many rows as the longest column has values, so that each is there."""
    return rest_is_full(pairwise(*columns), max(map(len, columns)))


def dealt(rows: Sequence[tuple[Any, ...]], values: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Each row with one of the values, in turn; the fast tier runs one row in three, and each value there."""
    dealt = [(*row, *values[(k + k // 3) % len(values)]) for k, row in enumerate(rows)]
    return [row if k % 3 == 0 else _full(row) for k, row in enumerate(dealt)]


def _full(row: Any) -> Any:
    if hasattr(row, "marks"):  # already one of pytest's
        values, marks, name = row.values, row.marks, row.id
    else:
        values, marks, name = row if isinstance(row, tuple) else (row,), (), None
    return pytest.param(*values, marks=(*marks, pytest.mark.full), id=name)
