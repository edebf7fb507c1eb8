# SPDX-License-Identifier: Apache-2.0
"""The rest of a pass: the other workers' samples of an epoch of which this worker has seen its own batches.

If a pass that was split turns out to be an evaluation, each worker completes it, so that it sees every sample once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from paceline.core.world import World
from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling.assignment import EvenAssignment, Portion
from paceline.data.sampling.position import Position
from paceline.data.sampling.sampler import SamplingPlan
from paceline.data.sampling.split import Rounds, split_of


def can_complete(plan: SamplingPlan, position: Position, workers: int) -> bool:
    """Whether every worker can compute the rest of an epoch.

    The epoch must be whole, of known length, split in rounds, and give each worker a batch.
    """
    if plan.in_shards or position.others or plan.streamed(position.epoch) is not None:
        return False
    return plan.places(position.epoch) >= workers


def rest_of_pass(plan: SamplingPlan, world: World, epoch: int, batches: int) -> Iterator[Portion]:
    """What remains for a worker that has seen its first `batches` batches.

    First the other workers' parts of the rounds that it has begun, then the loader's own batches in order. So rank 0,
    after its first batch, continues with the loader's second.
    """
    places = plan.places(epoch)
    split = split_of(plan.cut(places, world.size))
    assert isinstance(split, Rounds)
    rest, whole = Ranges([(0, places)]), world.size if plan.whole else 0
    shares = [EvenAssignment(epoch, rest, split, rank, 0, whole) for rank in range(world.size) if rank != world.rank]
    for number in range(min(batches, len(split))):
        yield from filter(None, (share.portion(number) for share in shares))
    if batches < len(split):
        begin = split.bounds(batches)[0]
        for low, high in pairwise([*range(begin, places, plan.unit), places]):
            yield Portion(epoch, [(low, high)])
