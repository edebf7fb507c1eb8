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
