# SPDX-License-Identifier: Apache-2.0
"""The rest of a pass: what the other workers have of an epoch of which this worker has seen its own batches.

A pass that was split and turns out to be an evaluation is completed with it, so that the worker has seen all samples,
each once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from paceline.core.world import World
from paceline.data.sampling.assignment import Portion
from paceline.data.sampling.position import Position
from paceline.data.sampling.sampler import SamplingPlan
from paceline.data.sampling.split import Rounds, Split, split_of


def can_complete(plan: SamplingPlan, position: Position, workers: int) -> bool:
    """Whether the rest of an epoch can be told, and every worker can know that it is wanted.

    It is split in rounds, all of it is there, it is known, and each worker has a batch of it.
    """
    if plan.in_shards or position.others or plan.streamed(position.epoch) is not None:
        return False
    return plan.places(position.epoch) >= workers


def rest_of_pass(plan: SamplingPlan, world: World, epoch: int, batches: int) -> Iterator[Portion]:
    """What is left for a worker that has seen its first `batches` batches.

    First the other workers' parts of the rounds that it has begun, then the loader's own batches in their order. So the
    first worker, which has seen only its first batch, goes on with the second of the loader.

    Args:
        plan: of the loader.
        world: this worker.
        epoch: of the order.
        batches: that it was given.
    """
    places = plan.places(epoch)
    split = split_of(plan.cut(places, world.size))
    assert isinstance(split, Rounds)
    for number in range(min(batches, len(split))):
        for rank in range(world.size):
            if rank != world.rank:
                yield from _part(plan, split, epoch, number, rank, world.size)
    if batches < len(split):
        begin = split.bounds(batches)[0]
        for low, high in pairwise([*range(begin, places, plan.unit), places]):
            yield Portion(epoch, [(low, high)])


def _part(plan: SamplingPlan, split: Split, epoch: int, number: int, rank: int, workers: int) -> Iterator[Portion]:
    assert isinstance(split, Rounds)
    begin, end = split.bounds(number)
    if plan.whole and end - begin < workers:
        yield Portion(epoch, [(begin, end)], (rank, workers))
        return
    begin, end = split.part(number, rank)
    if begin < end:
        yield Portion(epoch, [(begin, end)])
