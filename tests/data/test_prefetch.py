# SPDX-License-Identifier: Apache-2.0
"""Data are there before they are asked for, and a cache smaller than an epoch is not of no use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline_plugins.data import Cache, PackedDataset
from tests.data.cache.server import Server
from tests.data.packed.made import packed
from tests.helpers import simulate
from tests.tables import rest_is_full


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


@pytest.mark.parametrize(("workers", "rule"), rest_is_full([(2, "sync"), (1, "sync"), (2, "asgd")], 1))
def test_packed_data_through_a_cache_of_half_an_epoch(workers: int, rule: str, tmp_path: Path) -> None:
    place = packed(tmp_path, samples=200, shard_bytes=8_000)
    files = {file.name: file.read_bytes() for file in place.iterdir()}
    whole = sum(len(body) for name, body in files.items() if name.endswith(".tar"))

    def program() -> tuple[list[int], list[set[Any]]]:
        fetched, seen, model = [0], [], nn.Linear(1, 1)
        with Cache(tmp_path / "cache", cap_bytes=whole // 2) as cache:
            data = PackedDataset(server.url("").rstrip("/"), decode=lambda sample: int(sample["txt"]), cache=cache)
            run = paceline.attach(model, torch.optim.SGD(model.parameters(), 0.1), rule)
            shared = run.share(DataLoader(data, 5, shuffle=True))
            for _ in range(4):
                seen.append({int(number) for batch in shared for number in batch})
                fetched.append(sum(one.fetched_bytes for one in cache.stats().values()))
            run.close()
        return fetched, seen

    with Server(files) as server:
        found = simulate(program, workers) if workers > 1 else [program()]
    for epoch in range(4):
        assert sorted(number for _, seen in found for number in seen[epoch]) == list(range(200))
    assert sum(fetched[-1] - fetched[1] for fetched, _ in found) < 3 * 0.75 * whole
