# SPDX-License-Identifier: Apache-2.0
"""The split of an epoch: every sample on exactly one worker, whatever n, b and N are."""

from __future__ import annotations

import pytest

from paceline.data.split import deal_batches, even_parts, round_bounds, worker_batches

CASES = [
    (n, b, N) for n in (0, 1, 2, 3, 7, 8, 16, 17, 31, 96, 97, 100) for b in (1, 2, 4, 16) for N in (1, 2, 3, 4, 16)
]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 16])
def test_every_sample_exactly_once_and_no_batch_too_large(workers: int) -> None:
    for n, b, size in CASES:
        if size != workers:
            continue
        parts = [worker_batches(n, b, size, r) for r in range(size)]
        seen = sorted(i for mine in parts for low, high in mine for i in range(low, high))
        assert seen == list(range(n)), (n, b, size)
        assert all(0 < high - low <= b for mine in parts for low, high in mine), (n, b, size)
        steps = [len(mine) for mine in parts]
        assert max(steps) - min(steps) <= 1, (n, b, size)
        if b >= 2 and n >= size:
            assert max(steps) == min(steps), (n, b, size)  # all make the same number of steps


def test_full_rounds_are_what_one_worker_would_see_in_a_batch_of_all() -> None:
    parts = [worker_batches(48, 4, 3, r) for r in range(3)]
    for k in range(4):
        assert [mine[k] for mine in parts] == [(12 * k + 4 * r, 12 * k + 4 * r + 4) for r in range(3)]


def test_a_small_rest_is_shared_by_cutting_the_last_two_rounds_anew() -> None:
    assert round_bounds(17, 4, 4) == [(0, 9), (9, 17)]
    assert round_bounds(20, 4, 4) == [(0, 10), (10, 20)]  # and not 16 and 4, which are batches of one
    assert round_bounds(24, 4, 4) == [(0, 16), (16, 24)]
    assert round_bounds(20, 2, 4) == [(0, 8), (8, 16), (16, 20)]
    assert round_bounds(3, 4, 4) == [(0, 3)]


def test_even_parts() -> None:
    assert even_parts(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert even_parts(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 8])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_batches_of_a_users_sampler_are_dealt_once(count: int, workers: int) -> None:
    batches, at = [], 0
    for k in range(count):
        batches.append(list(range(at, at + 1 + k % 3)))
        at += 1 + k % 3
    parts = [deal_batches(batches, workers, r) for r in range(workers)]
    assert sorted(i for mine in parts for batch in mine for i in batch) == list(range(at))
    assert all(len(batch) > 0 for mine in parts for batch in mine)
