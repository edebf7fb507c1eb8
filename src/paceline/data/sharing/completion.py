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
    return plan.cut(plan.places(position.epoch), workers)[1] >= workers


def rest_of_pass(plan: SamplingPlan, world: World, epoch: int, batches: int) -> Iterator[Portion]:
    """What remains for a worker that has seen its first `batches` batches.

    First the other workers' parts of the rounds that it has begun, then the loader's own batches in order. So rank 0,
    after its first batch, continues with the loader's second.
    """
    places = plan.places(epoch)
    cut = plan.cut(places, world.size)
    split = split_of(cut)
    assert isinstance(split, Rounds)
    rest = Ranges([(0, places)])
    shares = [
        EvenAssignment(epoch, rest, split, rank, 0, plan.tail) for rank in range(world.size) if rank != world.rank
    ]
    for number in range(min(batches, len(split))):
        yield from filter(None, (share.portion(number) for share in shares))
    begin = split.bounds(batches)[0] if batches < len(split) else cut[1]  # `drop_last` may leave out a round
    for low, high in pairwise([*range(begin, places, plan.unit), places]):
        yield Portion(epoch, [(low, high)])
