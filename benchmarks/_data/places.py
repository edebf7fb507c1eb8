# SPDX-License-Identifier: Apache-2.0
"""What does not grow with the data: a resume in the middle of 10^9 samples, and an order of 10^10.

The data set has a length and computes its samples. Worker 2 of 4 has gone through half of an epoch, as its position
says; its state, as JSON as a checkpoint holds it, goes into a new share, and the time until the first batch is taken.
A second resume is on three workers, who split what is left.
"""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.core.world import World
from paceline.data import LoaderRegistry
from paceline.data.sampling.permutation import Permutation

SAMPLES, PLACES, BATCH, WORKERS, RANK = 10**9, 10**10, 16, 4, 2


class Numbers(Dataset[Any]):
    """Sample k is k."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def feed_of(rank: int, workers: int) -> tuple[LoaderRegistry, Any]:
    """A worker's data."""
    feed = LoaderRegistry(World(rank, workers), 0, lambda epoch, batches: None)
    return feed, feed.share(DataLoader(Numbers(), BATCH, shuffle=True))


def saved() -> list[dict[str, Any]]:
    """What a checkpoint in the middle of the epoch holds of each of four workers."""
    states = []
    for rank in range(WORKERS):
        feed, share = feed_of(rank, WORKERS)
        batches = iter(share)
        next(batches)
        position = share._position
        position.now.batches = position.now.entered = SAMPLES // (2 * BATCH * WORKERS)  # as if it had gone so far
        states.append(json.loads(json.dumps(feed.state())))
        batches.close()
    return states


def resume_s(states: list[dict[str, Any]], rank: int, workers: int) -> float:
    """Seconds from a checkpoint's state to the first batch."""
    began = time.perf_counter()
    feed, share = feed_of(rank, workers)
    if workers == len(states):
        feed.load(states[rank])
    else:
        feed.regroup(states)
    assert len(next(iter(share))) == BATCH
    return time.perf_counter() - began


def permutation(repeats: int) -> dict[str, float]:
    """Places of 10^10 a second, in portions of 4,096, and the bytes that they need."""
    order, rng, times = Permutation(PLACES, 0), np.random.default_rng(0), []
    for _ in range(repeats):
        places = rng.integers(0, PLACES, 4096)
        began = time.perf_counter()
        order.at(places)
        times.append(time.perf_counter() - began)
    tracemalloc.start()
    Permutation(PLACES, 1).at(np.arange(4096))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"places_per_s": round(4096 / statistics.median(times)), "peak_bytes": peak}


def measure(repeats: int = 5) -> dict[str, Any]:
    """Seconds and rates."""
    states = saved()
    same = [resume_s(states, RANK, WORKERS) for _ in range(repeats)]
    fewer = [resume_s(states, RANK, WORKERS - 1) for _ in range(repeats)]
    return {
        "resume_s": round(max(same), 5),
        "resume_on_three_s": round(max(fewer), 5),
        "state_bytes": len(json.dumps(states[RANK])),
        "permutation": permutation(50 * repeats),
    }
