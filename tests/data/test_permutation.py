# SPDX-License-Identifier: Apache-2.0
"""The permutation that is computed: each place once, in constant memory, and no order likelier than another."""

from __future__ import annotations

import tracemalloc
from itertools import permutations

import numpy as np
import pytest

from paceline.data.sampling.sampler import LIMIT, Permutation

PINNED = {
    (10, 0): [7, 5, 6, 4, 8, 0, 2, 1, 3, 9],
    (7, 42): [0, 2, 6, 1, 5, 4, 3],
    (10**10, 1): [4277305505, 6961843817, 2452272416],
}


def whole(n: int, key: int) -> list[int]:
    found: list[int] = Permutation(n, key).at(np.arange(n)).tolist()
    return found


@pytest.mark.parametrize("key", [0, 1, 12345, 2**63 - 1, -7])
def test_every_sample_has_one_place(key: int) -> None:
    for n in range(200):
        assert sorted(whole(n, key)) == list(range(n)), n


def test_the_same_at_every_call_and_in_any_company() -> None:
    want = whole(1_000, 5)
    assert want == whole(1_000, 5)
    one = Permutation(1_000, 5)
    assert [one.at(np.array([k])).item() for k in range(0, 1_000, 7)] == want[::7]
    assert one.at(np.arange(999, -1, -1)).tolist() == want[::-1]


def test_the_orders_are_pinned() -> None:
    """A checkpoint of today names these orders for ever: a change here loses and repeats samples."""
    assert whole(10, 0) == PINNED[10, 0]
    assert whole(7, 42) == PINNED[7, 42]
    assert Permutation(10**10, 1).at(np.array([0, 1, 10**10 - 1])).tolist() == PINNED[10**10, 1]


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_all_orders_of_four_are_equally_likely() -> None:
    """Over 4,800 keys: chi square with 23 degrees of freedom is above 58.6 in 1 of 16,000 cases."""
    keys, index = 4_800, {order: k for k, order in enumerate(permutations(range(4)))}
    counts = np.zeros(24)
    for key in range(keys):
        counts[index[tuple(whole(4, key))]] += 1
    assert chi_square(counts, keys / 24) < 58.6


@pytest.mark.parametrize("n", [16, 37, 100])
def test_every_place_holds_every_sample_equally_often(n: int) -> None:
    """Chi square of the table of places and samples has mean (n-1)^2 and a deviation of sqrt(2) (n-1)."""
    keys = 40 * n
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), whole(n, key)] += 1
    freedom = (n - 1) ** 2
    assert abs(chi_square(counts, keys / n) - freedom) < 5 * (2 * freedom) ** 0.5


def test_ten_thousand_million_samples_take_no_memory() -> None:
    n, asked = 10**10, 1_000_000
    places = np.arange(0, n, n // asked)[:asked]
    tracemalloc.start()
    one = Permutation(n, 1)
    made = tracemalloc.get_traced_memory()[1]
    found = one.at(places)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made < 10_000 and peak < 100 * asked
    assert len(np.unique(found)) == asked and found.min() >= 0 and found.max() < n
    assert abs(found.mean() / n - 0.5) < 0.002  # 7 deviations of the mean of so many


@pytest.mark.parametrize("n", [-1, LIMIT + 1])
def test_what_cannot_be_made_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"a permutation of {n} samples"):
        Permutation(n, 0)
