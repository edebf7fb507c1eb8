# SPDX-License-Identifier: Apache-2.0
"""Samplers that are huge or never end: each worker takes its part as it comes, every place once, all in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

import paceline
from paceline.core import rng
from paceline.data.sampling import sampler as drawing
from paceline.data.sampling.sampler import Drawing, StreamedOrder, drawn
from tests.data.test_shared_loader import Numbers
from tests.helpers import simulate

HUGE = 10**10


class Repeated(Sampler[Any]):
    """Goes through another sampler without an end, as loaders do that keep their processes over epochs."""

    def __init__(self, sampler: Sampler[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


def batches(make: Callable[[], DataLoader[Any]], workers: int, count: int, rule: str = "averaging") -> list[Any]:
    """The first batches of each worker, and what it says of its length."""

    def program() -> tuple[list[list[int]], int | None]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with paceline.attach(model, optimizer, rule) as run:
            shared = run.share(make())
            found = []
            for batch in islice(shared, count):
                found.append(batch.tolist())
                model.weight.grad = torch.zeros_like(model.weight)
                optimizer.step()
            return found, shared._length()

    return simulate(program, workers)


def huge() -> DataLoader[Any]:
    data = Numbers(50)
    return DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True, num_samples=HUGE))


def endless() -> DataLoader[Any]:
    data = Numbers(24)
    return DataLoader(data, batch_sampler=Repeated(BatchSampler(RandomSampler(data), 2, False)))


def test_a_huge_sampler_is_drawn_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "HELD", 64)
    monkeypatch.setattr(drawing, "CHUNK", 8)
    (one, length), (other, _) = batches(huge, 2, 40)
    assert length == HUGE // 8 and len(one) == len(other) == 40 and all(len(batch) == 4 for batch in one + other)
    alone = Drawing(lambda: huge().sampler, lambda: rng.seed_all(5), [])
    assert drawn(alone, HUGE).at([(0, 3)]) and one != other
    monkeypatch.undo()
    assert batches(huge, 2, 40)[0][0][:16] == one[:16]  # the same order, however much of it is held


def test_an_endless_sampler_of_batches_is_split_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "HELD", 64)
    monkeypatch.setattr(drawing, "CHUNK", 4)
    for workers in (2, 3):
        found = batches(endless, workers, 24 // workers)
        assert all(length is None for _, length in found)
        for epoch in (0, 1):  # twelve batches an epoch of the program
            part = slice(epoch * 12 // workers, (epoch + 1) * 12 // workers)
            assert sorted(k for part_of, _ in found for batch in part_of[part] for k in batch) == list(range(24))


def test_places_that_lie_behind_are_drawn_again_and_generators_outside_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drawing, "HELD", 16)
    monkeypatch.setattr(drawing, "CHUNK", 4)
    sampler = RandomSampler(range(1000), replacement=True, num_samples=HUGE)
    order = drawn(Drawing(lambda: sampler, lambda: rng.seed_all(3), []), HUGE)
    assert isinstance(order, StreamedOrder) and len(order) == HUGE
    before = torch.get_rng_state()
    first = order.at([(0, 8)])
    far = order.at([(500, 508)])
    assert len(order._held) < 100 and order.at([(500, 508)]) == far
    assert order.at([(0, 8)]) == first and order.at([(500, 508)]) == far
    assert torch.equal(torch.get_rng_state(), before)
