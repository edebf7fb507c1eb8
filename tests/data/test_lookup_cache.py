# SPDX-License-Identifier: Apache-2.0
"""What stands at places that were computed together is what stands there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from paceline.core.world import World
from paceline.data import LoaderRegistry
from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling.position import Position
from paceline.data.sampling.sampler import Permutation, SamplingPlan, Shuffled
from paceline.data.sampling.split import EvenAssignment, Portion, split_of

RANGE = st.tuples(st.integers(0, 400), st.integers(0, 100)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(RANGE, max_size=8), st.lists(RANGE, max_size=3))
def test_what_was_looked_up_together_is_what_each_place_holds(
    coming: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    plan = SamplingPlan(DataLoader(TensorDataset(torch.arange(500)), 4, shuffle=True), 3, Position(), 1)
    for ranges in (asked, coming, asked):
        assert plan.ids(Portion(1, ranges), lambda: [Portion(1, coming)]) == Shuffled(500, 3, 1).at(ranges)


def test_a_look_at_what_comes_takes_nothing_away() -> None:
    """An even supply that is looked into gives the same portions as one that is not."""
    cut = ("rounds", 10_003, 16, 3)
    for rank in range(3):
        seen, blind = (EvenAssignment(0, Ranges([(0, 10_003)]), split_of(cut), rank, 2) for _ in range(2))
        count = 0
        while (portion := blind.next(wait=True)) is not None:
            if count % 7 == 0:
                assert next(iter(seen.known())) == portion
            assert seen.next(wait=True) == portion
            count += 1
        assert seen.next(wait=True) is None and not list(seen.known()) and count == len(split_of(cut)) - 2


def test_an_epoch_is_computed_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not batch by batch, which takes longer than to load small samples."""
    calls: list[int] = []
    at = Permutation.at
    monkeypatch.setattr(Permutation, "at", lambda self, places: (calls.append(len(places)), at(self, places))[1])
    registry = LoaderRegistry(World(0, 4), 0, lambda epoch, batches: None)
    share = registry.share(DataLoader(TensorDataset(torch.arange(40_000)), 4, shuffle=True))
    assert sum(len(ids) for (ids,) in share) == 10_000
    assert len(calls) <= 5 and sum(calls) <= 10_100  # a place more for the size of a batch
