# SPDX-License-Identifier: Apache-2.0
"""Lanes of requests: whatever the shards, the number of processes and of requests ahead, and wherever one stops."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

from paceline.data import ShardStream
from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling.position import UNIT, ShardProgress
from paceline.data.sampling.split import Portion
from paceline.data.streams.dataset import Request, ShardAssignment, ShardBatch, ShardReading, _ProcessQueues, _Reader
from tests.data.test_streams import Counted


class Process:
    """What a loader process does, and how often it opened a shard."""

    def __init__(self, sizes: list[int], batch: int, buffer: int) -> None:
        self.shards = Counted(sizes)
        self.reader = _Reader(ShardStream(self.shards, False, buffer), list, batch, False, 0)


def course(queues: _ProcessQueues, processes: list[Process], ahead: int) -> Iterator[ShardBatch]:
    """As a `DataLoader` does it: requests to the processes in turn, answers in order."""
    under_way: deque[tuple[int, Request | None]] = deque()
    sent = 0
    while True:
        while len(under_way) < ahead * len(processes):
            try:
                under_way.append((sent % len(processes), next(queues)))
            except StopIteration:
                break
            sent += 1
        if not under_way:
            return
        process, request = under_way.popleft()
        found = queues.answered(processes[process].reader[request])
        if found is not None:
            yield found


def places(portions: list[Portion]) -> Ranges:
    """Of all of them; none may come twice."""
    found = Ranges()
    for portion in portions:
        for begin, end in portion.places:
            assert found.add(begin, end) == end - begin > 0
    return found


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    batch=st.integers(1, 4),
    buffer=st.sampled_from([0, 3]),
    width=st.integers(1, 3),
    ahead=st.integers(1, 3),
    stop=st.integers(0, 30),
    done=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=4),
)
def test_every_place_once_and_nothing_forgotten_at_a_stop(
    sizes: list[int], batch: int, buffer: int, width: int, ahead: int, stop: int, done: list[tuple[int, int]]
) -> None:
    whole = Ranges([(0, len(sizes) * UNIT)])
    before = [(shard * UNIT, shard * UNIT + batches * batch) for shard, batches in done if shard < len(sizes)]
    assignment = ShardAssignment(0, whole.without(before), 1, 0, ShardProgress())
    processes = [Process(sizes, batch, buffer) for _ in range(width)]
    queues = _ProcessQueues(assignment, _first(assignment), width, batch, lambda epoch, shard: shard)
    found: list[ShardBatch] = []
    for one in course(queues, processes, ahead):
        found.append(one)
        if len(found) == stop:
            break
    handed = places([one.portion for one in found])
    left = places([*queues.begun(), *iter(lambda: assignment.next(wait=True), None)])
    assert handed.without(left) == handed  # nothing is in both
    assert Ranges([*handed, *left]) == whole.without(before)
    if len(found) < stop:
        assert not left
    for one in found:
        _check_samples(one, sizes, buffer)
    opened = [shard for process in processes for shard, _ in process.shards.opened]
    assert len(opened) == len(set(opened))  # lanes keep to their processes


def _first(assignment: ShardAssignment) -> Any:
    return assignment.next(wait=True)


def _check_samples(found: ShardBatch, sizes: list[int], buffer: int) -> None:
    """A batch holds the samples of its places, in the order of the stream."""
    ((begin, end),) = found.portion.places
    shard = begin // UNIT
    order = list(ShardStream(Counted(sizes), False, buffer).read(shard, 0, 0, 0))
    want = order[begin % UNIT : end - shard * UNIT]
    assert (found.batch or []) == want and found.samples == len(want)


class Noise:
    """Samples that are drawn as they are read."""

    def __len__(self) -> int:
        return 3

    def read(self, shard: int, skip: int) -> Iterator[Any]:
        return (torch.rand(()) for _ in range(skip, 5))


def _finds_the_stream(process: int) -> None:
    info = get_worker_info()
    assert info is not None and type(info.dataset) is ShardStream


def noise(seed: int, epoch: int) -> list[list[float]]:
    loader: DataLoader[Any] = DataLoader(
        ShardStream(Noise(), False), 2, num_workers=2, worker_init_fn=_finds_the_stream
    )
    assignment = ShardAssignment(epoch, Ranges([(0, 3 * UNIT)]), 1, 0, ShardProgress())
    return [found.batch.tolist() for found in ShardReading(loader, seed).batches(assignment)]


@pytest.mark.processes
def test_what_is_random_in_processes_is_a_matter_of_the_seed_and_the_epoch() -> None:
    before = torch.get_rng_state()
    first = noise(1, 0)
    assert first == noise(1, 0) and len(first) == 9
    assert first != noise(1, 1) and first != noise(2, 0)
    assert len({number for batch in first for number in batch}) == 15  # no two alike
    assert torch.equal(before, torch.get_rng_state())  # nothing is drawn here


@pytest.mark.processes
def test_a_process_that_dies_is_told() -> None:
    class Deadly(Counted):
        def read(self, shard: int, skip: int) -> Iterator[int]:
            os._exit(3)

    loader: DataLoader[Any] = DataLoader(ShardStream(Deadly([5])), 2, num_workers=1)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(ShardReading(loader, 0).batches(ShardAssignment(0, Ranges([(0, UNIT)]), 1, 0, ShardProgress())))
