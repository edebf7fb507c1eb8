# SPDX-License-Identifier: Apache-2.0
"""Bounded staleness: the bound over many simulated events, who leaves the minimum, and what a read contains."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.forecast.sim import Clock, exponential
from paceline.rules.outer import Sum
from paceline.rules.payload import Gradient
from paceline.rules.rule import Rule
from paceline.rules.schedule import Bounded
from paceline.rules.topology import Sharded
from paceline.update.server.shard import WorkerClocks
from tests.helpers import attached


def bound(staleness: int | None) -> Bounded:
    return Bounded(staleness, overlap=0)


def race(staleness: int, steps: list[int], lost: dict[int, int], seed: int, speeds: list[float]) -> tuple[int, int]:
    """Workers that compute for random times; (events, the largest lead that was seen).

    Worker r finishes after steps[r] clocks, or vanishes in the middle of its step number lost[r]. The lead is counted
    here by a list of our own.
    """
    generator, clocks = random.Random(seed), WorkerClocks(bound(staleness), range(len(steps)))
    own: dict[int, int] = dict.fromkeys(range(len(steps)), 0)
    events = [(generator.expovariate(speeds[r]), r) for r in own]
    heapq.heapify(events)
    held: list[int] = []
    happened = most = 0
    while events:
        now, rank = heapq.heappop(events)
        happened += 1
        if lost.get(rank) == own[rank]:
            clocks.leave(rank)
            del own[rank]
        else:
            own[rank] += 1
            clocks.tick(rank, own[rank])
            if own[rank] == steps[rank]:
                clocks.leave(rank)
                del own[rank]
            else:
                held.append(rank)
        if not held:
            continue
        slowest, waiting = min(own.values()), []
        for other in held:
            if clocks.may_start(other):
                most = max(most, own[other] - slowest)
                heapq.heappush(events, (now + generator.expovariate(speeds[other]), other))
            else:
                assert own[other] - slowest > staleness, "nobody waits without need"
                waiting.append(other)
        held = waiting
    assert not held and not own, "everybody comes to the end"
    return happened, most


def test_the_bound_holds_over_many_events() -> None:
    """Of six workers of different speeds two are lost on the way, and the others end at different times."""
    total = 0
    for seed, staleness in enumerate([1, 3, 10]):
        steps = [6_000, 8_000, 5_000, 7_000, 6_000, 5_500]
        lost = {0: 2_000 + seed, 4: 5_500}
        happened, most = race(staleness, steps, lost, seed, [1.0, 2.0, 1.5, 0.7, 5.0, 1.0])
        assert happened == sum(steps[r] for r in (1, 2, 3, 5)) + sum(lost.values()) + len(lost)
        assert most == staleness, "and it is made use of"
        total += happened
    assert total > 99_000


def test_who_is_done_or_lost_holds_up_nobody() -> None:
    clocks = WorkerClocks(bound(2), range(3))
    clocks.tick(0, 3)
    clocks.tick(1, 1)
    assert not clocks.may_start(0) and clocks.may_start(1)
    assert clocks.holding_up(0) == [2] and clocks.slowest == 0
    clocks.leave(2)
    assert clocks.may_start(0) and clocks.slowest == 1 and clocks.sharing(9) == 2
    clocks.tick(0, 4)
    assert clocks.holding_up(0) == [1]
    clocks.leave(1)
    assert clocks.may_start(0) and clocks.holding_up(0) == []
    clocks.leave(0)
    assert clocks.slowest is None and clocks.sharing(99) == 1 and clocks.may_start(0)


def test_a_successor_takes_over_the_clocks_and_waits_for_those_who_take_part() -> None:
    clocks = WorkerClocks(bound(1), range(3))
    clocks.leave(2)
    clocks.load([[0, 5], [1, 4], [2, 1]])
    assert clocks.state() == [[0, 5], [1, 4], [2, 1]] and clocks.slowest == 4


class Counters(nn.Module):
    """Element r of every 64 counts the pushes of worker r that are in the model."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(size))


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_read_contains_all_updates_up_to_the_bound_and_the_readers_own(staleness: int, seed: int) -> None:
    """Shards at four owners, whose answers take different times; workers of different speeds and numbers of steps."""
    workers, shards, steps = 4, 6, [60, 45, 30, 60]
    rule = Rule(Bounded(staleness, overlap=0), Gradient(), topology=Sharded(64), outer=Sum())

    def network(source: int, to: int, nbytes: int, generator: random.Random) -> float:
        return generator.expovariate(2.0)

    def program() -> int:
        transport = paceline.communication.virtual.transport.current()
        assert transport is not None
        rank = transport.world.rank
        with attached(Counters(64 * shards), rule, lr=1.0) as (run, model, _):
            newer = 0
            optimizer = run._context.owned[0][0]
            for clock in range(steps[rank]):
                seen = model.p.detach().reshape(shards, 64)
                assert torch.equal(seen[:, rank], torch.full((shards,), float(clock))), "read my writes"
                for other in range(workers):
                    least = min(clock - staleness, steps[other])
                    assert bool((seen[:, other] >= least).all())
                    newer += int((seen[:, other] > max(least, 0)).sum())
                model.p.grad = torch.zeros(64 * shards)
                model.p.grad.reshape(shards, 64)[:, rank] = -1.0
                optimizer.step()
        assert model.p.detach().reshape(shards, 64)[:, :workers].tolist() == [[float(n) for n in steps]] * shards
        return newer

    clock = Clock(compute=lambda r, k, g: exponential(1.0 + r)(r, k, g), network=network, seed=seed)
    found: list[Any] = paceline.simulate(program, workers, clock=clock)
    assert all(newer > 0 for newer in found), "else this would be lockstep"
