# SPDX-License-Identifier: Apache-2.0
"""Orders of an epoch: each sample once, the same however they are asked for, and shards read a few at a time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.sampling.sampler import Drawn, InShards, Order, Sequential, Shuffled, places

property_test = settings(database=None, deadline=None, derandomize=True, max_examples=40)
sizes = st.lists(st.integers(0, 12), max_size=20)
KINDS: dict[str, Callable[[], Order]] = {
    "in turn": lambda: Sequential(97),
    "shuffled": lambda: Shuffled(97, seed=3, epoch=1),
    "drawn": lambda: Drawn([k * 7 % 97 for k in range(97)]),
    "in shards": lambda: InShards([10, 0, 30, 1, 16, 40], seed=3, epoch=1, buffer=2),
}


def whole(order: Order) -> list[int]:
    return list(order.at([(0, len(order))]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_once(kind: str) -> None:
    order = KINDS[kind]()
    assert len(order) == 97 and sorted(whole(order)) == list(range(97))


@pytest.mark.parametrize("kind", KINDS)
@property_test
@given(data=st.data())
def test_windows_cut_anywhere_agree(kind: str, data: st.DataObject) -> None:
    order, row = KINDS[kind](), whole(KINDS[kind]())
    cuts = sorted(data.draw(st.lists(st.integers(0, 97), max_size=6)))
    windows = list(zip([0, *cuts], [*cuts, 97], strict=True))
    assert [sample for window in windows for sample in order.at([window])] == row
    picked = data.draw(st.permutations(windows))
    assert list(order.at(picked)) == [sample for begin, end in picked for sample in row[begin:end]]


# -- in shards ------------------------------------------------------------------------------------


def shard_of(sizes: Sequence[int]) -> list[int]:
    """Sample -> its shard."""
    return [shard for shard, size in enumerate(sizes) for _ in range(size)]


@property_test
@given(sizes, st.integers(1, 6), st.integers(0, 5))
def test_shards_of_any_size(sizes: list[int], buffer: int, seed: int) -> None:
    order = InShards(sizes, seed, 0, buffer)
    assert sorted(whole(order)) == list(range(sum(sizes)))


@property_test
@given(sizes, st.integers(1, 6), st.integers(0, 5))
def test_only_a_buffer_of_shards_is_open_at_a_time(sizes: list[int], buffer: int, seed: int) -> None:
    shard, row = shard_of(sizes), whole(InShards(sizes, seed, 0, buffer))
    last = {shard[sample]: place for place, sample in enumerate(row)}
    open_: set[int] = set()
    for place, sample in enumerate(row):
        open_.add(shard[sample])
        assert len(open_) <= buffer
        open_ = {one for one in open_ if last[one] > place}


def test_neighbours_come_from_the_different_shards_of_a_buffer() -> None:
    shard, row = shard_of([50] * 20), whole(InShards([50] * 20, seed=1, epoch=0, buffer=5))
    changes = sum(shard[a] != shard[b] for a, b in pairwise(row))
    assert 0.75 < changes / len(row) < 0.85  # 4 of 5, where all of a buffer is mixed


def test_samples_of_a_shard_are_in_another_order_in_every_epoch_and_buffer() -> None:
    alone = {tuple(whole(InShards([40], seed=2, epoch=epoch))) for epoch in range(4)}
    assert len(alone) == 4
    row = whole(InShards([40] * 4, seed=2, epoch=0, buffer=1))
    assert len({tuple(sample % 40 for sample in row[k : k + 40]) for k in range(0, 160, 40)}) == 4


def test_a_buffer_of_no_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer must be at least 1 shard, got 0"):
        InShards([1], 0, 0, buffer=0)


# -- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda: Sequential(10**9), lambda: Shuffled(10**9, 1, 0), lambda: InShards([10**6] * 1_000, 1, 0)]
)
def test_an_order_of_a_thousand_million_samples_is_no_list(make: Callable[[], Order]) -> None:
    tracemalloc.start()
    order = make()
    found = order.at([(5 * 10**8, 5 * 10**8 + 64), (10**9 - 1, 10**9)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(order) == 10**9 and len(set(found)) == 65
    assert peak < 300_000


def test_places_of_ranges() -> None:
    assert places([(3, 5), (9, 10)]).tolist() == [3, 4, 9] and places([]).tolist() == []
