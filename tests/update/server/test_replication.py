# SPDX-License-Identifier: Apache-2.0
"""Pushes that are sent again, and shards that have them already: a cluster of plain objects, killed at random moments.

Nothing here is the ledger's word: each shard counts in its values, as every push adds 1 at its sample in every shard.
"""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch

from paceline.rules.outer import Sum
from paceline.rules.schedule import Bounded
from paceline.update.server.durability import KEPT_BYTES, Replicas, UnreplicatedPushes, interval
from paceline.update.server.owner import REPLICA, ShardServer
from paceline.update.server.protocol import PendingExchange, ShardRequest
from paceline.update.server.shard import EPOCHS, AddDelta, IncomingPush, ParameterShard, PushNumbers, WorkerClocks

WORKERS, SHARDS, SAMPLES, EVERY = 4, 4, 40, 3


class Worker:
    """An owner of one shard, and a sender."""

    def __init__(self, rank: int, cluster: Cluster) -> None:
        self.rank, self.cluster = rank, cluster
        self.server = ShardServer(rank, {rank: cluster.shard(rank)}, cluster.shard)
        self.server.begin_replica((rank - 1) % WORKERS)
        self.replicas = Replicas(self.server, EVERY, lambda: cluster.heir(rank), self.send_replica)
        self.kept, self.clock = UnreplicatedPushes(), 0

    def send_replica(self, shard: int, number: int, about: dict[str, Any], row: torch.Tensor) -> None:
        heir = self.cluster.heir(self.rank)
        assert heir is not None
        row = row.clone()

        def arrives() -> None:
            self.cluster.workers[heir].server.keep_replica(about, row)
            self.cluster.say(heir, self.rank, lambda: self.tell(self.replicas.kept(heir, shard, number)))

        self.cluster.say(self.rank, heir, arrives)

    def tell(self, said: list[tuple[int, int, int]]) -> None:
        for sender, shard, number in said:
            self.cluster.say(self.rank, sender, partial(self.cluster.safe, sender, self.rank, shard, number))

    def push(self, sample: int) -> None:
        self.clock += 1
        values = torch.zeros(SAMPLES)
        values[sample] = 1
        requests = [ShardRequest(shard, 0, values, None, 0) for shard in range(SHARDS)]
        pending = PendingExchange(self.clock, requests, self.clock, marks=[(0, 0, sample, sample + 1)])
        self.kept.add(pending)
        for request in requests:
            self.send(pending, request)

    def send(self, pending: PendingExchange, request: ShardRequest) -> None:
        owner = self.cluster.owners[request.shard]
        assert request.values is not None
        values = request.values.clone()  # an owner uses them up
        incoming = IncomingPush(self.rank, pending.clock, 0, 1, marks=pending.marks)
        self.cluster.say(self.rank, owner, lambda: self.cluster.workers[owner].take(request.shard, values, incoming))

    def take(self, shard: int, values: torch.Tensor, incoming: IncomingPush) -> None:
        self.server.push(shard, values, incoming, None)
        self.replicas.pushed(shard)
        self.tell([(incoming.sender, shard, self.replicas.safe(shard, incoming.sender))])


class Cluster:
    """Workers, and what is on its way between each two of them, in order."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.live, self.owners = set(range(WORKERS)), {shard: shard for shard in range(SHARDS)}
        self.lines: dict[tuple[int, int], deque[Any]] = {}
        self.free, self.done = list(range(SAMPLES)), set[int]()
        self.held: dict[int, set[int]] = {rank: set() for rank in range(WORKERS)}
        self.workers = {rank: Worker(rank, self) for rank in range(WORKERS)}

    def shard(self, number: int) -> ParameterShard:
        return ParameterShard(
            number, torch.zeros(SAMPLES), lambda anchor: AddDelta(Sum()), WorkerClocks(Bounded(), ()), False
        )

    def heir(self, rank: int) -> int | None:
        after = [(rank + k) % WORKERS for k in range(1, WORKERS)]
        return next((one for one in after if one in self.live), None)

    def say(self, source: int, to: int, what: Any) -> None:
        if source in self.live and to in self.live:
            self.lines.setdefault((source, to), deque()).append(what)

    def safe(self, sender: int, owner: int, shard: int, number: int) -> None:
        worker = self.workers[sender]
        if self.owners[shard] == owner:
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
        was_successor = {one for one in self.live if one != rank and self.heir(one) == rank}
        self.live.discard(rank)
        for (source, to), queue in list(self.lines.items()):
            if to == rank:
                queue.clear()
            elif source == rank:  # those were on the wire
                for _ in range(self.dice.randint(0, len(queue))):
                    queue.popleft()()
                queue.clear()
        moved = {shard for shard, owner in self.owners.items() if owner == rank}
        heir = self.heir(rank) if rank not in self.live else None
        assert heir is not None
        for shard in moved:
            self.owners[shard] = heir
            assert self.workers[heir].server.adopt(shard)[1] == REPLICA
        for one in was_successor:
            self.workers[one].replicas.renew(set(self.workers[one].server.shards) - moved)
        self.workers[heir].replicas.renew(moved)
        for one in sorted(self.live):
            for pending, request in list(self.workers[one].kept.again(moved)):
                self.workers[one].send(pending, request)
        self.free = sorted(self.held.pop(rank) - self.done) + self.free

    def run(self, deaths: list[int]) -> None:
        steps = 0
        while self.step() or self.hurry():
            steps += 1
            assert steps < 20_000
            if deaths and steps == deaths[0]:
                deaths.pop(0)
                self.kill(self.dice.choice(sorted(self.live)))
                self.settle()

    def settle(self) -> None:
        """The new replicas arrive before the next death."""
        for (source, to), queue in list(self.lines.items()):
            if source in self.live and to in self.live:
                for _ in range(len(queue)):
                    queue.popleft()()

    def hurry(self) -> bool:
        """At the end senders ask for what is not safe; whether there is any."""
        found = False
        for rank in sorted(self.live):
            for owner in sorted({self.owners[shard] for shard in self.workers[rank].kept.shards}):
                found = True
                self.workers[owner].tell(self.workers[owner].replicas.want(rank))
        return found


@pytest.mark.parametrize("block", range(4))
def test_each_push_is_in_each_piece_once_whoever_dies_whenever(block: int) -> None:
    """Three of four workers die, one after another, at any moments: 100 runs."""
    for seed in range(25):
        dice = random.Random(1000 * block + seed)
        cluster = Cluster(dice)
        cluster.run(sorted(dice.sample(range(5, 300), 3)))
        assert len(cluster.live) <= 2 and not cluster.free
        for shard, owner in cluster.owners.items():
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


def test_what_a_sender_keeps_is_bounded() -> None:
    """About a gigabyte of pushes, or two of them where one is larger."""
    assert interval(1000) == 16 and interval(100_000_000) == 10 and interval(10 * KEPT_BYTES) == 2


def push_of(number: int, shards: tuple[int, ...]) -> PendingExchange:
    requests = [ShardRequest(shard, 0, torch.zeros(1), None, 0) for shard in shards]
    return PendingExchange(number, requests, number, marks=[(0, 0, number, number + 1)])


def test_samples_are_done_when_all_streams_have_pushed_them_safely() -> None:
    """Of two optimizers the second pushes after the first what it made of the same minibatch."""
    kept = UnreplicatedPushes()
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
