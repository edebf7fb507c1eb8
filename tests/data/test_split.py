# SPDX-License-Identifier: Apache-2.0
"""The split of an epoch: every place on exactly one worker, whatever n, b and N are."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.ledger.epoch_ledger import ENDLESS
from paceline.data.sampling.split import Rounds, Split, Stripes, split_of

CASES = [(n, b) for n in (0, 1, 2, 3, 7, 8, 16, 17, 31, 96, 97, 100) for b in (1, 2, 3, 4, 16)]
property_test = settings(database=None, deadline=None, derandomize=True, max_examples=100)
cuts = st.tuples(st.sampled_from(["rounds", "stripes", "alone"]), st.integers(0, 120), st.integers(1, 9))


def made(kind: str, n: int, b: int, workers: int) -> tuple[Split, int]:
    """A split, and of how many workers it is."""
    workers = 1 if kind == "alone" else workers
    return split_of((kind, n, b, workers)), workers


def parts(split: Split, rank: int) -> list[tuple[int, int]]:
    """A worker's batches; none of them is empty."""
    found = [split.part(number, rank) for number in range(len(split))]
    return [(begin, end) for begin, end in found if begin < end]


@pytest.mark.parametrize("kind", ["rounds", "stripes", "alone"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 16])
def test_every_place_once_and_no_batch_too_large(kind: str, workers: int) -> None:
    for n, b in CASES:
        split, size = made(kind, n, b, workers)
        rows = [parts(split, rank) for rank in range(size)]
        assert sorted(i for row in rows for low, high in row for i in range(low, high)) == list(range(n)), (n, b)
        assert all(high - low <= b for row in rows for low, high in row), (n, b)


@pytest.mark.parametrize("kind", ["rounds", "stripes"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 16])
def test_all_workers_make_the_same_number_of_steps(kind: str, workers: int) -> None:
    for n, b in CASES:
        split, _ = made(kind, n, b, workers)
        steps = [split.batches(rank) for rank in range(workers)]
        assert steps == [len(parts(split, rank)) for rank in range(workers)], (n, b)
        assert max(steps) - min(steps) <= 1 and max(steps) == len(split), (n, b)
        if b >= 2 and n >= workers:
            assert max(steps) == min(steps), (n, b)


@pytest.mark.parametrize("kind", ["rounds", "stripes"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 16])
def test_batches_of_one_sample_are_avoided(kind: str, workers: int) -> None:
    """Batch norm cannot take them; two samples for each worker are enough to do without."""
    for n, b in CASES:
        split, _ = made(kind, n, b, workers)
        if b >= 4 and n >= 2 * workers:
            sizes = [high - low for rank in range(workers) for low, high in parts(split, rank)]
            assert min(sizes) >= 2, (n, b)


def bounds(n: int, b: int, workers: int) -> list[tuple[int, int]]:
    split = Rounds(n, b, workers)
    return [split.bounds(number) for number in range(len(split))]


def test_a_small_rest_is_shared_by_cutting_the_last_two_rounds_anew() -> None:
    assert bounds(17, 4, 4) == [(0, 9), (9, 17)]
    assert bounds(20, 4, 4) == [(0, 10), (10, 20)]  # and not 16 and 4, which are batches of one
    assert bounds(24, 4, 4) == [(0, 16), (16, 24)]
    assert bounds(20, 2, 4) == [(0, 8), (8, 16), (16, 20)]
    assert bounds(3, 4, 4) == [(0, 3)]


# -- what is done ---------------------------------------------------------------------------------


@property_test
@given(cuts, st.integers(1, 6), st.data())
def test_what_is_done_is_the_union_of_the_parts(cut: tuple[str, int, int], workers: int, data: st.DataObject) -> None:
    split, size = made(*cut, workers)
    rounds = [data.draw(st.integers(0, split.batches(rank))) for rank in range(size)]
    want = {i for rank, own in enumerate(rounds) for number in range(own) for i in range(*split.part(number, rank))}
    done = split.done(rounds)
    assert sorted(want) == [i for begin, end in done for i in range(begin, end)]


def test_what_is_done_of_a_long_epoch_is_a_few_ranges() -> None:
    assert Rounds(10**9, 32, 4).done([10**6 + 2, 10**6, 10**6 + 1, 10**6]).state() == [
        [0, 128 * 10**6 + 32],
        [128 * 10**6 + 64, 128 * 10**6 + 96],
        [128 * 10**6 + 128, 128 * 10**6 + 160],
    ]
    assert len(list(Stripes(10**9, 32, 4).done([10**6, 5, 0, 7 * 10**6]))) == 3


# -- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rounds", "stripes", "alone"])
@pytest.mark.parametrize("n", [10**9, ENDLESS])
def test_a_split_of_a_thousand_million_places_is_no_list(kind: str, n: int) -> None:
    tracemalloc.start()
    split, size = made(kind, n, 32, 4)
    last = split.part(len(split) - 1, size - 1)
    steps = split.batches(size - 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert last[1] == n and steps == len(split) == -(-n // (32 * size))
    assert peak < 10_000
