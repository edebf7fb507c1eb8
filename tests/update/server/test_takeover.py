# SPDX-License-Identifier: Apache-2.0
"""What a new owner knows of shards whose owner was lost."""

from __future__ import annotations

import torch

from paceline.rules.outer import Share
from paceline.rules.schedule.bounded import Bounded
from paceline.update.server.shard import AddDelta, IncomingPush, ParameterShard, ShardServer, WorkerClocks

WORKERS = 3


def shard(number: int, version: int = 0, fill: float = 0.0) -> ParameterShard:
    clocks = WorkerClocks(Bounded(staleness=1, overlap=0), range(WORKERS))
    made = ParameterShard(number, torch.full((4,), fill), lambda anchor: AddDelta(Share()), clocks, False)
    made.version = version
    return made


def test_the_new_owner_learns_how_far_each_worker_is() -> None:
    """Without it worker 1 would be held back for worker 2, which is ahead of it and waits for it elsewhere."""
    server = ShardServer(0, {}, shard)
    server.begin_replica(7)
    server.leave(0)
    server.adopt(7)
    out = torch.empty(4)
    assert not server.push(7, torch.zeros(4), IncomingPush(1, 5, 0, 1), out).may_start
    server.tick(2, [[7, 6], [8, 6]])  # of shard 8 somebody else is told
    assert server.shards[7].clocks.may_start(1)


def test_a_new_owner_begins_with_the_replica_that_says_which_pushes_it_holds() -> None:
    """Also where this worker has pulled newer values: nobody could say what is in those."""
    old = shard(7, fill=1.0)
    for number in (1, 2, 3):
        old.push(torch.ones(4), IncomingPush(1, number, 0, 1, marks=[(0, 0, number, number + 1)]))
    server = ShardServer(0, {}, lambda number: shard(number, 9, 2.0))
    server.keep_replica(*old.snapshot())
    assert server.adopt(7) == 3
    new = server.shards[7]
    before = new.anchor.clone()
    for number in (2, 3):  # sent again
        new.push(torch.ones(4), IncomingPush(1, number, 0, 1, marks=[(0, 0, number, number + 1)]))
    assert torch.equal(new.anchor, before) and torch.equal(before, old.anchor)
    new.push(torch.ones(4), IncomingPush(1, 4, 0, 1))
    assert not torch.equal(new.anchor, before)
