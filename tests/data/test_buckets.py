# SPDX-License-Identifier: Apache-2.0
"""Batches of similar length: every sample once, within bounds, and rounds whose workers wait little."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import paceline
from paceline.data import BucketBatches
from tests.data.test_shared_loader import Numbers
from tests.helpers import simulate

Batch = list[int]


def lengths_of(n: int = 400, seed: int = 0) -> list[int]:
    """As of sentences: many short ones, few long ones."""
    found: list[int] = (np.random.default_rng(seed).gamma(2.0, 40.0, n) + 1).astype(int).tolist()
    return found


def drawn(sampler: BucketBatches, seed: int = 0, workers: int | None = None) -> list[Batch]:
    torch.manual_seed(seed)
    return list(sampler) if workers is None else list(sampler.for_workers(workers))


def padded(batch: Batch, lengths: list[int]) -> int:
    return max(lengths[i] for i in batch) * len(batch)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    batch_size=st.none() | st.integers(1, 9),
    most=st.none() | st.integers(30, 200),
    buckets=st.none() | st.integers(1, 80) | st.just([3, 10]),
    shuffle=st.booleans(),
)
def test_every_sample_once_within_both_bounds(
    lengths: list[int], batch_size: int | None, most: int | None, buckets: Any, shuffle: bool
) -> None:
    if batch_size is None and most is None:
        batch_size = 4
    sampler = BucketBatches(lengths, batch_size, most, buckets, shuffle)
    for seed in range(2):
        found = drawn(sampler, seed)
        assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
        assert len(found) == len(sampler)
        assert all(batch_size is None or len(batch) <= batch_size for batch in found)
        assert all(most is None or padded(batch, lengths) <= most for batch in found)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_the_batches_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    sampler = BucketBatches(lengths_of(397), 8)
    found = drawn(sampler, 3, workers)
    assert {frozenset(batch) for batch in found} == {frozenset(batch) for batch in drawn(sampler, 3)}


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_batches_of_a_round_are_neighbours_in_length(workers: int) -> None:
    lengths = lengths_of(8 * 12)
    longest = [max(lengths[i] for i in batch) for batch in drawn(BucketBatches(lengths, 8, buckets=96), 3, workers)]
    assert len(longest) == 12
    rounds = sorted(sorted(longest[k : k + workers]) for k in range(0, 12, workers))
    assert all(one[-1] <= other[0] for one, other in pairwise(rounds))  # no two rounds overlap
    assert longest != sorted(longest)


@pytest.mark.parametrize(
    ("lengths", "choices", "message"),
    [
        ([3, -1], {"batch_size": 2}, "sample 1 has length -1"),
        ([], {"batch_size": 2}, "is the data set empty"),
        ([[1, 2]], {"batch_size": 2}, "one number for each sample"),
        ([1.5], {"batch_size": 2}, "whole numbers"),
        ([float("nan")], {"batch_size": 2}, "whole numbers"),
        (["a"], {"batch_size": 2}, "whole numbers"),
        ([3, 11], {"most": 10}, "sample 1 has length 11, and a batch may have 10 padded units"),
        ([3], {}, "neither batch_size nor most"),
        ([3], {"batch_size": 0}, "batch_size must be"),
        ([3], {"most": -1}, "most must be"),
        ([3], {"batch_size": 1, "buckets": 0}, "buckets must be"),
        ([3], {"batch_size": 1, "buckets": [5, 5]}, "lengths that grow"),
    ],
)
def test_what_makes_no_sense_is_refused(lengths: Any, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketBatches(lengths, **choices)


# -- across workers --------------------------------------------------------------------------------


def passes(make: Callable[[], Any], workers: int, rule: str = "averaging", epochs: int = 2) -> list[list[list[Batch]]]:
    """found[worker][epoch] = batches, trained on one by one."""

    def program() -> list[list[Batch]]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        run = paceline.attach(model, optimizer, rule)
        shared = run.share(make())
        found: list[list[Batch]] = []
        for _ in range(epochs):
            found.append([])
            for batch in shared:
                found[-1].append(batch.tolist())
                optimizer.zero_grad()
                model(batch.float().view(-1, 1) / 1000).mean().backward()
                optimizer.step()
        run.close()
        return found

    return simulate(program, workers)


@pytest.mark.parametrize("rule", ["averaging", "bmuf(period=2)", "asgd()"])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_sample_once_under_every_rule(rule: str, workers: int) -> None:
    lengths = lengths_of(101)
    make: Callable[[], Any] = lambda: DataLoader(Numbers(101), batch_sampler=BucketBatches(lengths, most=900))  # noqa: E731
    found = passes(make, workers, rule)
    for epoch in range(2):
        assert sorted(i for worker in found for b in worker[epoch] for i in b) == list(range(101))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2), (2, 4)])
def test_what_is_left_of_an_epoch_is_dealt_to_other_workers_in_the_order_of_then(before: int, after: int) -> None:
    lengths = lengths_of(160)

    def program(states: list[dict[str, Any]] | None) -> Callable[[], tuple[list[Batch], dict[str, Any]]]:
        def body() -> tuple[list[Batch], dict[str, Any]]:
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            run = paceline.attach(model, optimizer, "sync")
            shared = run.share(DataLoader(Numbers(160), batch_sampler=BucketBatches(lengths, 8)))
            len(shared)  # makes an order before anybody knows of the checkpoint
            if states is not None:
                run._context.loaders.regroup(states)
            found: list[Batch] = []
            for batch in shared:
                found.append(batch.tolist())
                model(batch.float().view(-1, 1) / 1000).mean().backward()
                optimizer.step()
                if states is None and len(found) == 3:
                    break
            state = run._context.loaders.state()
            run.abandon()
            return found, state

        return body

    first = simulate(program(None), before)
    second = simulate(program([state for _, state in first]), after)
    seen = [i for found, _ in [*first, *second] for batch in found for i in batch]
    assert sorted(seen) == list(range(160))


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["averaging", "asgd()"])
@pytest.mark.parametrize("workers", [2, 3])
def test_of_a_weighted_draw_nothing_is_dropped_or_repeated(rule: str, workers: int) -> None:
    class Told(WeightedRandomSampler):
        draws: list[Batch] = []  # noqa: RUF012

        def __iter__(self) -> Any:
            self.draws.append(list(super().__iter__()))
            return iter(self.draws[-1])

    found = passes(lambda: DataLoader(Numbers(9), 2, sampler=Told([1.0, 5.0, *[0.5] * 7], 41)), workers, rule)
    for epoch in range(2):
        seen = sorted(i for worker in found for b in worker[epoch] for i in b)
        assert seen in [sorted(draw) for draw in Told.draws]
    assert len({tuple(draw) for draw in Told.draws}) == 2  # every worker made the same draw, anew in each epoch
