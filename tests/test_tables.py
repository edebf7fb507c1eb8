# SPDX-License-Identifier: Apache-2.0
"""Each two values of two columns stand together in a row."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.tables import each_value_fast, pairwise


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 2), (3, 5), (2, 3, 4), (5, 1, 2, 3), (12, 4, 5)])
def test_each_two_values_stand_together(sizes: tuple[int, ...]) -> None:
    columns = [[f"{number}.{k}" for k in range(size)] for number, size in enumerate(sizes)]
    rows = pairwise(*columns)
    assert len(set(rows)) == len(rows) <= len(list(product(*columns)))
    for one, other in combinations(range(len(columns)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(columns[one], columns[other]))
    assert rows == pairwise(*columns)


def test_twelve_by_four_by_five_are_few() -> None:
    assert len(pairwise(range(12), range(4), range(5))) < 80  # of 240


def test_the_fast_tier_has_each_value() -> None:
    rows = each_value_fast("abc", [1, 2], "xy")
    fast = [row for row in rows if not hasattr(row, "marks")]
    assert [set(column) for column in zip(*fast, strict=True)] == [set("abc"), {1, 2}, set("xy")]
    assert all(row.marks[0].name == "full" for row in rows if hasattr(row, "marks"))
