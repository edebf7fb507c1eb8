# SPDX-License-Identifier: Apache-2.0
"""A loader as a plan: what stands where, whose generators are left alone, and what it costs when data are many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.core import rng
from paceline.data.sampling.position import Position
from paceline.data.sampling.sampler import Drawn, InShards, SamplingPlan, Sequential, Shuffled, generators_of
from paceline.data.sampling.split import Portion
from tests.data.test_shared_loader import Buckets, Numbers, Reversed


class Sharded(Numbers):
    shard_sizes = (40, 0, 25, 35)


def plan(loader: DataLoader[Any], seed: int = 3) -> SamplingPlan:
    return SamplingPlan(loader, seed, Position())


def whole(one: SamplingPlan, epoch: int = 0) -> list[Any]:
    return list(one.order(epoch).at([(0, one.places(epoch))]))


def kind(loader: DataLoader[Any]) -> type:
    return type(plan(loader).order(0))


def test_which_order_a_loader_has() -> None:
    data, sharded = Numbers(100), Sharded(100)
    assert kind(DataLoader(data, 4)) is Sequential
    assert kind(DataLoader(data, 4, shuffle=True)) is Shuffled
    assert kind(DataLoader(data, 4, sampler=RandomSampler(data))) is Shuffled
    assert kind(DataLoader(data, 4, sampler=RandomSampler(data, replacement=True))) is Drawn
    assert kind(DataLoader(data, 4, sampler=RandomSampler(data, num_samples=7))) is Drawn
    assert kind(DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0))) is Shuffled
    assert kind(DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0, shuffle=False))) is Sequential
    assert kind(DataLoader(data, 4, sampler=Reversed(100))) is Drawn
    assert kind(DataLoader(sharded, 4, shuffle=True)) is InShards
    assert kind(DataLoader(sharded, 4)) is Sequential


def test_a_place_is_a_sample_or_a_batch_of_the_users_sampler() -> None:
    one = plan(DataLoader(Numbers(31), 4, shuffle=True))
    assert (one.whole, one.unit, one.places(0)) == (False, 4, 31)
    one = plan(DataLoader(Numbers(31), batch_sampler=Buckets()))
    assert (one.whole, one.unit, one.places(0), one.nominal(0)) == (True, 1, 8, len(whole(one)[0]))
    assert one.ids(Portion(0, [(0, 3)])) == [i for batch in whole(one)[:3] for i in batch]
    cut = [one.ids(Portion(0, [(0, 8)], (rank, 3))) for rank in range(3)]
    assert [i for part in cut for i in part] == [i for batch in whole(one) for i in batch]
    assert [len(part) for part in cut] == [11, 10, 10]


SAMPLERS = ["random", "weighted", "own", "buckets"]


def drawn(name: str, generator: torch.Generator | None = None) -> DataLoader[int]:
    data = Numbers(31)
    sampler: Any = {
        "random": RandomSampler(data, replacement=True, generator=generator),
        "weighted": WeightedRandomSampler([1.0] * 31, 31, generator=generator),
        "own": Reversed(31),
    }.get(name)
    return DataLoader(data, batch_sampler=Buckets()) if sampler is None else DataLoader(data, 4, sampler=sampler)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_draws_from_the_seed_and_the_epoch_and_touches_no_generator(name: str) -> None:
    generator = torch.Generator().manual_seed(8)
    torch.manual_seed(1)
    before, own = torch.get_rng_state(), generator.get_state()
    first = whole(plan(drawn(name, generator)))
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(own, generator.get_state())
    torch.manual_seed(2)
    generator.manual_seed(9)
    assert whole(plan(drawn(name, generator))) == first
    assert whole(plan(drawn(name, generator)), epoch=1) != first != whole(plan(drawn(name), seed=4))


class Once(Sampler[int]):
    """Counts how often it is gone through."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter([4, 2, 0, 1, 3])

    def __len__(self) -> int:
        return 5


def test_a_sampler_is_gone_through_once_an_epoch() -> None:
    sampler = Once()
    one = plan(DataLoader(Numbers(5), 2, sampler=sampler))
    for epoch in (0, 0, 1, 0, 1):
        assert whole(one, epoch) == [4, 2, 0, 1, 3]
    assert sampler.times == 2


@pytest.mark.parametrize("name", [*SAMPLERS, "shuffle", "generator"])
def test_an_epoch_that_one_worker_began_is_played_from_its_own_generators(name: str) -> None:
    generator = torch.Generator().manual_seed(8)

    def make() -> DataLoader[int]:
        if name == "shuffle":
            return DataLoader(Numbers(31), 4, shuffle=True)
        if name == "generator":
            return DataLoader(Numbers(31), 4, shuffle=True, generator=generator)
        return drawn(name, generator)

    loader = make()
    torch.manual_seed(6)
    start = {**rng.capture(), "loader": [one.get_state() for one in generators_of(loader)]}
    want = [batch.tolist() for batch in loader]
    position = Position()
    position.played[0] = start
    before, own = torch.get_rng_state(), generator.get_state()
    one = SamplingPlan(make(), 3, position)
    count = one.places(0)
    found = [one.ids(Portion(0, [(k, min(count, k + one.unit))])) for k in range(0, count, one.unit)]
    assert found == want
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(own, generator.get_state())
