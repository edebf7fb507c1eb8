# SPDX-License-Identifier: Apache-2.0
"""Pushes that are sent again, and shards that have them already: a cluster of plain objects, killed at random moments.

Nothing here is the ledger's word: each shard counts in its values, as every push adds 1 at its sample in every shard.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch

from paceline.rules.outer import Sum
from paceline.rules.schedule import Bounded
from paceline.update.server.durability import Replicas, UnsafePushes
from paceline.update.server.membership import ServerMembership
from paceline.update.server.protocol import PendingExchange, ShardRequest
from paceline.update.server.shard import (
    EPOCHS,
    AddDelta,
    IncomingPush,
    ParameterShard,
    PushNumbers,
    ShardServer,
    WorkerClocks,
)

WORKERS, SHARDS, SAMPLES, EVERY = 5, 5, 40, 3


class Worker:
    """An owner of one shard, and a sender."""

    def __init__(self, rank: int, cluster: Cluster) -> None:
        self.rank, self.cluster = rank, cluster
        self.server = ShardServer(rank, {rank: cluster.shard(rank)}, cluster.shard)
        self.server.begin_replica((rank - 1) % WORKERS)
        self.replicas = Replicas(self.server, EVERY, cluster.members.replica_keeper, self.send_replica, self.tell)
        self.kept, self.clock = UnsafePushes(), 0

    def send_replica(self, shard: int, number: int, about: dict[str, Any], row: torch.Tensor) -> None:
        keeper = self.cluster.members.replica_keeper(shard)
        assert keeper is not None
        row = row.clone()

        def arrives() -> None:
            self.cluster.workers[keeper].server.keep_replica(about, row)
            self.cluster.say(keeper, self.rank, lambda: self.replicas.kept(shard, number))

        self.cluster.say(self.rank, keeper, arrives)

    def tell(self, news: Iterable[tuple[int, int, int, int]]) -> None:
        for sender, shard, number, _ in news:
            self.cluster.say(self.rank, sender, partial(self.cluster.safe, sender, self.rank, shard, number))

    def push(self, sample: int) -> None:
        self.clock += 1
        values = torch.zeros(SAMPLES)
        values[sample] = 1
        requests = {shard: ShardRequest(shard, 0, values, None, 0) for shard in range(SHARDS)}
        pending = PendingExchange(self.clock, requests, self.clock, marks=[(0, 0, sample, sample + 1)])
        self.kept.add(pending)
        for request in requests.values():
            self.send(pending, request)

    def send(self, pending: PendingExchange, request: ShardRequest) -> None:
        owner = self.cluster.members.owners[request.shard]
        assert request.values is not None
        values = request.values.clone()  # an owner uses them up
        incoming = IncomingPush(self.rank, pending.clock, 0, 1, marks=pending.marks)
        self.cluster.say(self.rank, owner, lambda: self.cluster.workers[owner].take(request.shard, values, incoming))

    def take(self, shard: int, values: torch.Tensor, incoming: IncomingPush) -> None:
        self.server.push(shard, values, incoming, None)
        self.replicas.pushed(shard)
        self.tell([(incoming.sender, shard, *self.replicas.safe(shard, incoming.sender))])


class Cluster:
    """Workers, and what is on its way between each two of them, in order."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.live = set(range(WORKERS))
        self.members = ServerMembership(0, WORKERS, {shard: shard for shard in range(SHARDS)})  # as all know it
        self.lines: dict[tuple[int, int], deque[Any]] = {}
        self.free, self.done = list(range(SAMPLES)), set[int]()
        self.held: dict[int, set[int]] = {rank: set() for rank in range(WORKERS)}
        self.workers = {rank: Worker(rank, self) for rank in range(WORKERS)}

    def shard(self, number: int) -> ParameterShard:
        return ParameterShard(
            number, torch.zeros(SAMPLES), lambda anchor: AddDelta(Sum()), WorkerClocks(Bounded(), ()), False
        )

    def say(self, source: int, to: int, what: Any) -> None:
        if source in self.live and to in self.live:
            self.lines.setdefault((source, to), deque()).append(what)

    def safe(self, sender: int, owner: int, shard: int, number: int) -> None:
        worker = self.workers[sender]
        if self.members.owners[shard] == owner:
            worker.kept.safe(shard, number)
        for _, _, sample, _ in worker.kept.done():
            self.held[sender].discard(sample)
            self.done.add(sample)

    def step(self) -> bool:
        """One thing happens; whether anything can."""
        lines = [key for key, queue in self.lines.items() if queue]
        able = [rank for rank in sorted(self.live) if self.free]
        if not lines and not able:
            return False
        if lines and (not able or self.dice.random() < 0.9):
            self.lines[self.dice.choice(lines)].popleft()()
            return True
        rank = self.dice.choice(able)
        sample = self.free.pop(0)
        self.held[rank].add(sample)
        self.workers[rank].push(sample)
        return True

    def kill(self, rank: int) -> None:
        """What it had sent may be lost from anywhere on, and each of the others goes on as a service does."""
        self.live.discard(rank)
        for (source, to), queue in list(self.lines.items()):
            if to == rank:
                queue.clear()
            elif source == rank:  # those were on the wire
                for _ in range(self.dice.randint(0, len(queue))):
                    queue.popleft()()
                queue.clear()
        moved = [shard for shard, owner in self.members.owners.items() if owner == rank]
        assert all(self.members.replica_keeper(shard) is not None for shard in moved)
        self.members.lost[rank] = "killed"
        self.members.take_over(moved)
        for shard in moved:
            self.workers[self.members.owners[shard]].server.adopt(shard)
        for one in sorted(self.live):
            for pending, request in list(self.workers[one].kept.again(moved, ())):
                self.workers[one].send(pending, request)
        self.free = sorted(self.held.pop(rank) - self.done) + self.free

    def run(self, deaths: list[int]) -> None:
        steps = 0
        while self.step() or self.hurry():
            steps += 1
            assert steps < 20_000
            if deaths and steps == deaths[0]:
                deaths.pop(0)
                lost = set(self.members.lost)
                near = {(rank + step) % WORKERS for rank in lost for step in (-1, 0, 1)}
                self.kill(self.dice.choice(sorted(self.live - near)))

    def hurry(self) -> bool:
        """At the end senders ask for what is not safe; whether there is any."""
        found = False
        for rank in sorted(self.live):
            for owner in sorted({self.members.owners[shard] for shard in self.workers[rank].kept.shards}):
                found = True
                self.workers[owner].replicas.want(rank)
        return found


@pytest.mark.parametrize("block", range(4))
def test_each_push_is_in_each_piece_once_whoever_dies_whenever(block: int) -> None:
    """Two of five workers that are no neighbours die, one after another, at any moments: 100 runs."""
    for seed in range(25):
        dice = random.Random(1000 * block + seed)
        cluster = Cluster(dice)
        cluster.run(sorted(dice.sample(range(5, 300), 2)))
        assert len(cluster.live) <= 4 and not cluster.free
        for shard, owner in cluster.members.owners.items():
            counts = cluster.workers[owner].server.shards[shard].anchor
            assert counts.tolist() == [1.0] * SAMPLES, (block, seed, shard)
        assert cluster.done == set(range(SAMPLES)), "and all of it is known to be done"


def test_a_push_is_known_by_its_number_and_by_its_samples() -> None:
    seen = PushNumbers()
    assert seen.is_new(1, 1, [(0, 0, 0, 4)]) and seen.is_new(1, 2, [(0, 0, 4, 8)])
    assert not seen.is_new(1, 2, [(0, 0, 4, 8)]), "the same push again"
    assert not seen.is_new(2, 1, [(0, 0, 0, 4)]), "another worker's, of the same samples"
    assert seen.is_new(2, 2, [(0, 0, 6, 10)]) and seen.repeated == 2, "half of it is new"
    other = PushNumbers()
    other.load(seen.state())
    assert not other.is_new(1, 2, []) and not other.is_new(3, 1, [(0, 0, 0, 10)]) and other.is_new(1, 3, [])
    for epoch in range(1, EPOCHS + 3):
        assert other.is_new(3, 1 + epoch, [(0, epoch, 0, 10)])
    assert len(other.state()["covered"]) == EPOCHS


def push_of(number: int, shards: tuple[int, ...]) -> PendingExchange:
    requests = {shard: ShardRequest(shard, 0, torch.zeros(1), None, 0) for shard in shards}
    return PendingExchange(number, requests, number, marks=[(0, 0, number, number + 1)])


def test_samples_are_done_when_all_streams_have_pushed_them_safely() -> None:
    """Of two optimizers the second pushes after the first what it made of the same minibatch."""
    kept = UnsafePushes()
    kept.clients = 2
    kept.add(push_of(1, (0, 1)))
    kept.safe(0, 1)
    kept.safe(1, 1)
    assert kept.done() == [], "the second may still push"
    kept.add(push_of(1, (2,)))
    kept.add(push_of(2, (0, 1)))
    for shard in (0, 1):
        kept.safe(shard, 2)
    assert kept.done() == [] and kept.marks[0] == (0, 0, 1, 2)
    kept.safe(2, 1)
    assert kept.done() == [(0, 0, 1, 2)]
    assert kept.done(all_pushed=True) == [(0, 0, 2, 3)] and len(kept) == 0
