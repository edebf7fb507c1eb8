# SPDX-License-Identifier: Apache-2.0
"""What a worker owns and serves: answers, who has left, and taking over from a neighbour."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.rules.outer import Elastic, Sum
from paceline.rules.schedule import Bounded
from paceline.update.server.shard import (
    REFUSED,
    ElasticPull,
    IncomingPush,
    OptimizerSteps,
    ParameterShard,
    PushResult,
    ShardServer,
    WorkerClocks,
)


def make(number: int, value: float = 0.0, *, staleness: int | None = None, elastic: bool = False) -> ParameterShard:
    clocks = WorkerClocks(Bounded(staleness, overlap=0), range(3))
    settings = {"lr": 1.0, "momentum": 0.5}

    def way(anchor: Tensor) -> ElasticPull | OptimizerSteps:
        return ElasticPull(Elastic(0.75), 3) if elastic else OptimizerSteps(Sum(), torch.optim.SGD, anchor, settings)

    return ParameterShard(number, torch.full((4,), value), way, clocks, False)


def server(rank: int = 0, *, staleness: int | None = None, elastic: bool = False) -> ShardServer:
    """It owns shard 7, and has pulled 5.0 last of every other."""
    shards = {7: make(7, staleness=staleness, elastic=elastic)}
    return ShardServer(rank, shards, lambda number: make(number, 5.0, staleness=staleness), elastic)


def tell(
    to: ShardServer, sender: int, value: float, *, clock: int = 1, version: int = 0, number: int = 7
) -> PushResult:
    return to.push(number, torch.full((4,), value), IncomingPush(sender, clock, version, 1), torch.empty(4))


def look(at: ShardServer, number: int = 7, reader: int = 0, after_push: bool = False) -> tuple[list[float], int]:
    out = torch.full((4,), 99.0)
    version = at.read(number, reader, out, after_push)
    return out.tolist(), version


def test_push_and_read() -> None:
    one = server()
    assert tell(one, 1, 1.0) == PushResult(0, True)
    assert look(one, reader=1, after_push=True) == ([-1.0] * 4, 1)
    assert tell(one, 2, 1.0) == PushResult(1, True)
    assert look(one) == ([-2.5] * 4, 2)


def test_the_sender_of_what_is_not_finite_is_told() -> None:
    one = server()
    assert tell(one, 1, float("nan")).delay == REFUSED and tell(one, 1, 1.0, clock=2).delay == 0
    assert look(one) == ([-1.0] * 4, 1)


def test_who_is_too_far_ahead_has_to_wait_until_the_slowest_has_pushed_or_left() -> None:
    one = server(staleness=1)
    assert tell(one, 0, 0.0, clock=1).may_start
    assert not tell(one, 0, 0.0, clock=2).may_start
    tell(one, 1, 0.0, clock=1)
    clocks = one.shards[7].clocks
    assert not clocks.may_start(0) and clocks.may_start(1) and clocks.may_start(2)
    one.leave(2)
    assert clocks.may_start(0)


def test_elastic_averaging_answers_with_the_center_from_before() -> None:
    one = server(elastic=True)
    out = torch.empty(4)
    one.push(7, torch.full((4,), 8.0), IncomingPush(1, 1, 0, 1), out)
    assert one.read(7, 1, out, after_push=True) == 1
    assert out.tolist() == [0.0] * 4, "the worker computes the same pull from it as the owner did"
    assert look(one) == ([2.0] * 4, 1)


def test_adopting_from_a_replica() -> None:
    """With the optimizer's state: the next step has the momentum of the last."""
    first, heir = server(0), server(1)
    heir.shards.clear()
    tell(first, 2, 1.0, clock=3)
    heir.keep_replica(*first.shards[7].snapshot())
    tell(first, 2, 1.0, clock=4)
    heir.keep_replica(*first.shards[7].snapshot())
    heir.leave(0)
    assert heir.adopt(7) == 2
    assert look(heir) == ([-2.5] * 4, 2)
    clocks = heir.shards[7].clocks
    assert sorted(clocks.state()) == [[0, 0], [1, 0], [2, 4]]
    clocks.tick(1, 3)
    assert clocks.slowest == 3, "who is lost holds up nobody"
    tell(heir, 2, 0.0, clock=5, version=2)
    assert look(heir) == ([-3.25] * 4, 3)
    answer = tell(heir, 1, 1.0, version=30)
    assert answer.delay == 0 and heir.shards[7].version == 31, "others have seen later versions than the replica"


def test_a_piece_of_somebody_else_is_not_served() -> None:
    with pytest.raises(KeyError):
        tell(server(), 1, 1.0, number=8)
