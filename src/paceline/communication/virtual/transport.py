# SPDX-License-Identifier: Apache-2.0
"""N workers in one process: each has its own thread, model and rank, and one runs at a time.

A worker runs until an exchange; there it leaves its contribution and passes the turn to the next worker, in rank order,
that can continue. The last member to contribute completes the exchange for all, with sums taken in rank order. With the
turn, process-wide state is swapped: the global random generators of torch (and of every CUDA device in use), NumPy and
`random`, `sys.argv`, `sys.stdout` and the module `__main__`. So a run repeats bit for bit, and a program that was
written for one process runs unchanged.

There are no timeouts: a deadlock is found at once, and the error says who waits for what.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.communication.base import (
    CompletedOperation,
    Pending,
    Transport,
    check_other,
    check_sizes,
    group_of,
    world_within,
)
from paceline.communication.calls import AGREEMENT
from paceline.communication.virtual.clock import Clock
from paceline.communication.virtual.scheduler import Cluster, Combine, Result
from paceline.core.world import World

_here = threading.local()


def _enter(cluster: Cluster, rank: int) -> None:
    _here.transport = VirtualTransport(cluster, range(cluster.size), rank)


def current() -> VirtualTransport | None:
    """The transport of this thread's virtual worker; None outside of :func:`run`."""
    return getattr(_here, "transport", None)


class _Receive:
    """A message to be received."""

    def __init__(self, transport: VirtualTransport, x: Tensor, source: int, number: int) -> None:
        self._transport, self._x, self._source, self._number = transport, x, source, number

    def wait(self) -> None:
        """Run other workers until the message has arrived."""
        if self._number >= 0:
            self._transport.take(self._x, self._source, self._number)
            self._number = -1


class VirtualTransport(Transport):
    """One virtual worker's connection: every operation is one exchange of the cluster.

    Args:
        cluster: the workers.
        members: their ranks in the cluster, in this connection's order.
        rank: this worker's place among them.
        parent: the connection of which this one is a subgroup.
        place: identifies this set of members.
    """

    name = "virtual"

    coarse = 16
    """Each chunk costs a turn of every worker, and an operation is complete when it is started."""

    def __init__(
        self,
        cluster: Cluster,
        members: Sequence[int],
        rank: int,
        parent: VirtualTransport | None = None,
        place: str = "",
    ) -> None:
        hosts = cluster.hosts
        whole = World(members[rank], cluster.size, 0, 1, hosts[members[rank]], hosts)
        super().__init__(world_within(whole, members), parent)
        self._cluster, self.members = cluster, tuple(members)
        self._place, self._parts = place, 0
        self._numbers: Counter[tuple[str, int]] = Counter()  # messages to and from each worker

    @property
    def cluster(self) -> Cluster:
        return self._cluster

    @property
    def serves_threads(self) -> bool:
        """A thread has no turn of its own."""
        return False

    def clone(self) -> VirtualTransport:
        """A connection with a byte count of its own."""
        return VirtualTransport(self.cluster, self.members, self.world.rank)

    def _exchange(self, label: str, contribution: Any, combine: Combine) -> Any:
        if self._place:
            label += f" among workers {', '.join(str(rank) for rank in self.members)}"
        rank = self.members[self.world.rank]
        self._cluster.workers[rank].call = "" if self.call == AGREEMENT else f" for {self.call}"
        return self._cluster.exchange(rank, label, contribution, combine, self.members, self._place)

    def now(self) -> float:
        return time.perf_counter() - self._cluster.away_s[self.members[self.world.rank]]

    def open_channels(self, number: int) -> None:
        """Does nothing: an operation is complete when it is started."""

    def channel(self, k: int) -> Transport:
        return self

    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        number, mine = group_of(self.world, groups)
        self._exchange(f"part into {groups!r}", None, _all_to_each)
        self._parts += 1
        members = [self.members[rank] for rank in mine]
        place = f"{self._place}/{self._parts}.{number}"
        return VirtualTransport(self.cluster, members, mine.index(self.world.rank), self, place)

    def all_reduce(self, x: Tensor) -> Pending:
        self.count("all_reduce", x)
        total = self._exchange(f"all_reduce of {x.numel()}", x, _sum_in_rank_order)
        x.copy_(total)
        return CompletedOperation()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        self.count("reduce_scatter", x)
        total = self._exchange(f"reduce_scatter of {x.numel()}", x, _sum_in_rank_order)
        out.copy_(total[self.world.rank])
        return CompletedOperation()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Pending:
        check_sizes(out, x, out_sizes, in_sizes, self.world.size)
        self.count("all_to_all", x, in_sizes[self.world.rank] if in_sizes is not None else None)
        if in_sizes is None or out_sizes is None:
            arrived = self._exchange(f"all_to_all of {x.numel()}", x.clone().unbind(0), _transpose)
            places: Sequence[Tensor] = out.unbind(0)
        else:
            arrived = self._exchange("all_to_all of parts", torch.split(x.clone(), list(in_sizes)), _transpose)
            places = torch.split(out, list(out_sizes))
        for source, (place, part) in enumerate(zip(places, arrived, strict=True)):
            if place.numel() != part.numel():
                raise ValueError(
                    self.world.sign(f"rank {source} sent {part.numel()} elements, {place.numel()} were expected")
                )
            place.copy_(part)
        return CompletedOperation()

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        self.count("all_gather", x)
        rows = self._exchange(f"all_gather of {x.numel()}", x.clone(), _stacked)
        out.copy_(rows.view_as(out))
        return CompletedOperation()

    def broadcast(self, x: Tensor, source: int) -> Pending:
        if self.world.rank == source:
            self.count("broadcast", x)
        rows = self._exchange(f"broadcast of {x.numel()} from {source}", x.clone(), _all_to_each)
        if self.world.rank != source:
            x.copy_(rows[source])
        return CompletedOperation()

    def send(self, x: Tensor, to: int) -> Pending:
        check_other(self.world, to, "send to")
        self.cluster.check()
        self.count("send", x)
        self._numbers["to", to] += 1
        self.cluster.mail[self._place, self.world.rank, to, self._numbers["to", to]] = x.clone()
        return CompletedOperation()

    def receive(self, x: Tensor, source: int) -> Pending:
        check_other(self.world, source, "receive from")
        self._numbers["from", source] += 1
        return _Receive(self, x, source, self._numbers["from", source])

    def take(self, x: Tensor, source: int, number: int) -> None:
        """Wait for message `number` of worker `source`, and copy it into `x`."""
        key = (self._place, source, self.world.rank, number)
        label = f"receive of {x.numel()} from worker {self.members[source]}"
        self.cluster.wait(self.members[self.world.rank], label, lambda: key in self.cluster.mail)
        x.copy_(self.cluster.mail.pop(key))

    def close(self) -> None:
        """Does nothing: the cluster ends with its threads."""


def _sum_in_rank_order(contributions: list[Tensor]) -> list[Tensor]:
    total = contributions[0].clone()
    for x in contributions[1:]:
        total.add_(x.to(total.device))
    return [total] * len(contributions)


def _transpose(contributions: list[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[parts[place] for parts in contributions] for place in range(len(contributions))]


def _stacked(contributions: list[Tensor]) -> list[Tensor]:
    return [torch.stack([x.to(contributions[0].device) for x in contributions])] * len(contributions)


def _all_to_each(contributions: list[Any]) -> list[list[Any]]:
    return [contributions] * len(contributions)


def run(
    workers: int, target: Callable[[], Result], hosts: Sequence[str] | None = None, clock: Clock | None = None
) -> Sequence[Result | None]:
    """Run `target()` in `workers` virtual workers; the results in rank order.

    Inside, `paceline.attach` finds the virtual cluster by itself. Every worker starts with the caller's random state,
    as N processes that set the same seed would. The first error of a worker is raised here.

    Args:
        workers: N, at least 1.
        target: called once in each worker, without arguments; the objects that it makes are that worker's own.
        hosts: a name for each worker's host, to test rules that depend on hosts; this host by default.
        clock: durations of computing and messages, for asynchronous rules; by default a minibatch takes one second,
            and a message none.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if hosts is not None and len(hosts) != workers:
        raise ValueError(f"hosts must name a host for each of {workers} workers, got {len(hosts)}")
    if current() is not None:
        raise ValueError("a virtual worker cannot start virtual workers of its own")
    return Cluster(workers, hosts, clock).run(_enter, target)
