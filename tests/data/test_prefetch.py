# SPDX-License-Identifier: Apache-2.0
"""Data are there before they are asked for, and a cache smaller than an epoch is not of no use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.data.sampling.order import InShards
from tests.helpers import simulate


class Told(Dataset[int]):
    """Notes what it is told, and what it is asked for."""

    def __init__(self, sizes: Sequence[int] | None = None, n: int = 300) -> None:
        self.n = sum(sizes) if sizes is not None else n
        if sizes is not None:
            self.shard_sizes, self.shuffle_buffer = sizes, 2
        self.notes: list[tuple[str, list[int]]] = []

    def __len__(self) -> int:
        return self.n

    def prefetch(self, ids: Sequence[int]) -> None:
        self.notes.append(("told", list(ids)))

    def __getitems__(self, ids: Sequence[int]) -> list[int]:
        self.notes.append(("asked", list(ids)))
        return list(ids)

    def shard(self, sample: int) -> int:
        return int(np.searchsorted(np.cumsum(self.shard_sizes), sample, side="right"))


def notes(make: Callable[[], Told], rule: str, workers: int = 2, epochs: int = 2) -> list[Told]:
    def program() -> Told:
        data, model = make(), nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = paceline.attach(model, optimizer, rule)
        shared = run.share(DataLoader(data, 4, shuffle=True))
        for _ in range(epochs):
            for _batch in shared:
                model(torch.ones(1)).sum().backward()
                optimizer.step()
        run.close()
        return data

    return simulate(program, workers)


@pytest.mark.parametrize(("rule", "workers"), [("sync", 1), ("sync", 2), ("averaging(period=2)", 2), ("asgd", 2)])
def test_what_is_asked_for_was_told_before(rule: str, workers: int) -> None:
    for data in notes(Told, rule, workers):
        told: set[int] = set()
        for kind, ids in data.notes:
            if kind == "told":
                told = set(ids)
            assert set(ids) <= told
    assert sum(kind == "told" for kind, _ in data.notes) < sum(kind == "asked" for kind, _ in data.notes) / 2


@pytest.mark.parametrize("rule", ["sync", "asgd"])
def test_shards_are_told_by_one_sample_each(rule: str) -> None:
    for data in notes(lambda: Told([40, 25, 60, 35, 40, 50, 0, 30]), rule):
        told: set[int] = set()
        for kind, ids in data.notes:
            if kind == "told":
                told = {data.shard(sample) for sample in ids}
                assert len(told) == len(ids)
            else:
                assert {data.shard(sample) for sample in ids} <= told


def test_a_worker_reads_few_shards_at_a_time_and_not_those_of_others() -> None:
    found = notes(lambda: Told([20] * 32), "sync", workers=4, epochs=1)
    asked = [{data.shard(i) for kind, ids in data.notes if kind == "asked" for i in ids} for data in found]
    assert sum(len(shards) for shards in asked) <= 32 + 3 * 2  # a window at a border is read by two
    for data in found:
        last: dict[int, int] = {}
        first: dict[int, int] = {}
        for number, ids in enumerate(ids for kind, ids in data.notes if kind == "asked"):
            for shard in map(data.shard, ids):
                first.setdefault(shard, number)
                last[shard] = number
        for number in range(max(last.values())):
            assert sum(first[shard] <= number <= last[shard] for shard in last) <= 2 * 2


def least_recently_used(epochs: list[list[int]], room: int) -> list[int]:
    """Hits in each epoch of a cache of `room` files."""
    kept: list[int] = []
    hits = []
    for order in epochs:
        hits.append(sum(1 for shard in order if _use(kept, shard, room)))
    return hits


def _use(kept: list[int], shard: int, room: int) -> bool:
    hit = shard in kept
    if hit:
        kept.remove(shard)
    kept.append(shard)
    del kept[:-room]
    return hit


def test_turning_keeps_as_many_hits_as_the_cache_has_files() -> None:
    sizes = [5] * 120
    turning = least_recently_used([InShards(sizes, 3, e, 4, turns=True).shards.tolist() for e in range(8)], 60)
    fresh = least_recently_used([InShards(sizes, 3, e, 4).shards.tolist() for e in range(8)], 60)
    assert turning[0] == fresh[0] == 0
    assert min(turning[1:]) >= 60 - 8  # blocks of 8 shards are shuffled
    assert sum(fresh[1:]) / 7 < 45
    orders = [InShards(sizes, 3, e, 4, turns=True) for e in range(4)]
    assert all(sorted(order.at([(0, 600)])) == list(range(600)) for order in orders)
    assert len({tuple(order.shards.tolist()) for order in orders}) == 4
