# SPDX-License-Identifier: Apache-2.0
"""N workers in one process: each has its own thread, model and rank, and one runs at a time.

A worker runs until an exchange; there it leaves its contribution and passes the turn to the next worker, in rank order,
that can continue: one that waits for nothing, or whose exchange is complete. The last member to contribute completes
the exchange for all, with sums taken in rank order. With the turn, process-wide state is swapped: the global random
generators of torch (and of every CUDA device in use), NumPy and `random`, `sys.argv`, `sys.stdout` and the module
`__main__`. So a run repeats bit for bit, and a program that was written for one process runs unchanged.

There are no timeouts: where no worker can continue, every worker gets an error that says who waits for what.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.communication.base import (
    AGREEMENT,
    CompletedOperation,
    Pending,
    Transport,
    check_other,
    check_sizes,
    group_of,
    world_within,
)
from paceline.communication.virtual.clock import Clock
from paceline.core.world import World
from paceline.errors import PeerLostError

Result = TypeVar("Result")
Combine = Callable[[list[Any]], list[Any]]


class Closable(Protocol):
    """Ends with a worker's program: closed if the program succeeds, abandoned if it fails."""

    @property
    def minibatches(self) -> int:
        """Steps that were made."""

    def close(self) -> None: ...

    def abandon(self, error: BaseException | None = None) -> None: ...


class Belonging(Protocol):
    """Further process-wide state: saved before a worker passes its turn, restored when it resumes."""

    def take(self) -> None: ...

    def put(self) -> None: ...


class _Globals:
    """Process-wide state that each worker has for itself, saved and restored with its turn."""

    def __init__(self) -> None:
        self.belongings: list[Belonging] = []
        self.take()

    def take(self) -> None:
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self.numpy = np.random.get_state()
        self.random = random.getstate()
        self.argv, self.stdout, self.main = sys.argv, sys.stdout, sys.modules["__main__"]
        for belonging in self.belongings:
            belonging.take()

    def put(self) -> None:
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.random)
        sys.argv, sys.stdout, sys.modules["__main__"] = self.argv, self.stdout, self.main
        for belonging in self.belongings:
            belonging.put()


class _Worker:
    def __init__(self, rank: int, state: _Globals) -> None:
        self.rank = rank
        self.globals = state
        self.go = threading.Semaphore(0)
        self.waits_for: str | None = None  # the exchange for which it waits
        self.call = ""  # the user's call to which the exchange belongs
        self.ready: Callable[[], bool] = lambda: False  # whether the exchange is complete
        self.finished = False
        self.error: BaseException | None = None


class Cluster:
    """The workers and their exchanges.

    Args:
        size: number of workers.
        hosts: each worker's host name; this host's by default.
        clock: the simulated time, which passes while all workers wait.
    """

    def __init__(self, size: int, hosts: Sequence[str] | None = None, clock: Clock | None = None) -> None:
        self.size = size
        self.timed = clock is not None  # else a minibatch takes one second, and a message no time
        self.clock = clock if clock is not None else Clock()
        self.clock.restart()
        self.shared: dict[str, Any] = {}  # objects that virtual workers share
        self.hosts = tuple(hosts) if hosts is not None else (World().host,) * size
        self.workers = [_Worker(rank, _Globals()) for rank in range(size)]
        self.away_s = [0.0] * size  # seconds in which other workers ran, since each worker's first turn
        self._exchanges: dict[str, tuple[dict[int, Any], dict[int, Any]]] = {}  # by place: contributions, and results
        self.mail: dict[tuple[str, int, int, int], Tensor] = {}  # (place, from, to, number) -> the message
        self._over = threading.Semaphore(0)
        self.owners: dict[int, tuple[int, Any]] = {}  # id of a parameter -> (rank that attached it, the parameter)
        self.endings: list[list[Closable]] = [[] for _ in range(size)]  # closed with each worker's program
        self._broken: str | None = None

    def exchange(self, at: VirtualTransport, label: str, contribution: Any, combine: Combine) -> Any:
        """Take part in an exchange; returns this worker's result once every member has contributed.

        Args:
            at: this worker's connection, whose members take part.
            label: describes the exchange; the same on all members.
            contribution: this worker's.
            combine: makes the list of results from the list of contributions, both in the order of the members.
        """
        self.check()
        rank, members, place = at.member, at.members, at.place
        if place:
            label += f" among workers {', '.join(str(one) for one in members)}"
        contributions, results = self._exchanges.setdefault(place, ({}, {}))
        contributions[rank] = contribution
        worker = self.workers[rank]
        worker.call = "" if at.call == AGREEMENT else f" for {at.call}"
        worker.waits_for, worker.ready = label, lambda: rank in results
        if len(contributions) < len(members):
            self._pass_on(rank)
        else:
            del self._exchanges[place]
            if any(self.workers[other].waits_for != label for other in members):
                self._broken = "the workers came to different exchanges: " + self._situation()
                raise PeerLostError(self._broken)
            results.update(zip(members, combine([contributions[other] for other in members]), strict=True))
        worker.waits_for = None
        return results[rank]

    def wait(self, rank: int, label: str, ready: Callable[[], bool]) -> None:
        """Run other workers until `ready()`."""
        self.check()
        if not ready():
            worker = self.workers[rank]
            worker.waits_for, worker.ready = label, ready
            self._pass_on(rank)
            worker.waits_for = None

    def keep(self, rank: int, belonging: Belonging) -> None:
        """Save and restore `belonging` with the turn of worker `rank` from now on."""
        self.workers[rank].globals.belongings.append(belonging)

    def check(self) -> None:
        """Raise the error that broke the cluster, if any."""
        if self._broken is not None:
            raise PeerLostError(self._broken)

    def _pass_on(self, rank: int) -> None:
        """Run the next worker that can continue, and wait for the turn to return."""
        following = self._next(rank)
        me = self.workers[rank]
        if following is None:
            self._broken = "no worker can continue: " + self._situation()
        elif following is not me:
            me.globals.take()
            left = time.perf_counter()
            following.go.release()
            me.go.acquire()
            self.away_s[rank] += time.perf_counter() - left
            me.globals.put()
        self.check()

    def _next(self, rank: int) -> _Worker | None:
        """The next worker that can continue; while there is none, simulated time passes."""
        while True:
            for step in range(1, self.size + 1):
                worker = self.workers[(rank + step) % self.size]
                if not worker.finished and (worker.waits_for is None or worker.ready() or self._broken is not None):
                    return worker
            if all(worker.finished for worker in self.workers) or not self.clock.step():
                return None

    def _situation(self) -> str:
        parts = []
        for worker in self.workers:
            if worker.error is not None:
                where = f"failed with {type(worker.error).__name__}: {worker.error}"
            elif worker.finished:
                where = "has ended"
            else:
                where = f"waits at {worker.waits_for}{worker.call}" if worker.waits_for else "is running"
            parts.append(f"worker {worker.rank} {where}")
        return "; ".join(parts)

    def run_worker(self, rank: int, target: Callable[[], Result], results: list[Result | None]) -> None:
        """The body of a worker's thread."""
        me = self.workers[rank]
        me.go.acquire()
        me.globals.put()
        _here.set(VirtualTransport(self, range(self.size), rank))
        try:
            try:
                results[rank] = target()
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise
            for ending in list(self.endings[rank]):
                ending.close()
        except BaseException as error:  # `run` raises it
            me.error = error
            for ending in list(self.endings[rank]):
                ending.abandon(error)
        finally:
            me.finished = True
            following = self._next(rank)
            if following is None and any(not w.finished for w in self.workers):
                self._broken = "no worker can continue: " + self._situation()
                following = self._next(rank)
            if following is None:
                self._over.release()
            else:
                following.go.release()

    def run(self, target: Callable[[], Result]) -> list[Result | None]:
        """Run `target` in every worker; the results in rank order, or the first failure."""
        results: list[Result | None] = [None] * self.size
        before = _Globals()
        threads = [
            threading.Thread(target=self.run_worker, args=(rank, target, results), name=f"worker-{rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        try:
            self.workers[0].go.release()
            self._over.acquire()
            for thread in threads:
                thread.join()
        finally:
            before.put()
        errors = [worker.error for worker in self.workers if worker.error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLostError)), errors[0])
        return results


_here: ContextVar[VirtualTransport | None] = ContextVar("virtual worker", default=None)


def current() -> VirtualTransport | None:
    """The transport of this thread's virtual worker; None outside of :func:`run`."""
    return _here.get()


class _Receive:
    """A message to be received, once."""

    def __init__(self, take: Callable[[], None]) -> None:
        self._take: Callable[[], None] | None = take

    def wait(self) -> None:
        """Run other workers until the message has arrived."""
        take, self._take = self._take, None
        if take is not None:
            take()


class VirtualTransport(Transport):
    """One virtual worker's connection: every operation is one exchange of the cluster.

    Args:
        cluster: the workers.
        members: their ranks in the cluster, in this connection's order.
        rank: this worker's place among them.
        parent: the connection of which this one is a subgroup.
        place: identifies this set of members.
        world: this worker among them, where it is known.
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
        world: World | None = None,
    ) -> None:
        hosts, member = cluster.hosts, members[rank]
        super().__init__(
            world or world_within(World(member, cluster.size, 0, 1, hosts[member], hosts), members), parent
        )
        self.cluster: Cluster = cluster
        self.members, self.member = tuple(members), member
        self.place, self._parts = place, 0
        self._numbers: Counter[tuple[str, int]] = Counter()  # messages to and from each worker

    @property
    def serves_threads(self) -> bool:
        """A thread has no turn of its own."""
        return False

    def clone(self) -> VirtualTransport:
        """A connection with a byte count of its own."""
        return VirtualTransport(self.cluster, self.members, self.world.rank, world=self.world)

    def now(self) -> float:
        return time.perf_counter() - self.cluster.away_s[self.member]

    def open_channels(self, number: int) -> None:
        """Does nothing: an operation is complete when it is started."""

    def channel(self, k: int) -> Transport:
        return self

    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        number, mine = group_of(self.world, groups)
        self.cluster.exchange(self, f"part into {groups!r}", None, _all_to_each)
        self._parts += 1
        members = [self.members[rank] for rank in mine]
        place = f"{self.place}/{self._parts}.{number}"
        return VirtualTransport(self.cluster, members, mine.index(self.world.rank), self, place)

    def all_reduce(self, x: Tensor) -> Pending:
        total = self.cluster.exchange(self, f"all_reduce of {x.numel()}", x, _sum_in_rank_order)
        self.count("all_reduce", x)
        x.copy_(total)
        return CompletedOperation()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        total = self.cluster.exchange(self, f"reduce_scatter of {x.numel()}", x, _sum_in_rank_order)
        self.count("reduce_scatter", x)
        out.copy_(total[self.world.rank])
        return CompletedOperation()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Pending:
        check_sizes(out, x, out_sizes, in_sizes, self.world.size)
        self.count("all_to_all", x, in_sizes[self.world.rank] if in_sizes is not None else None)
        if in_sizes is None or out_sizes is None:
            arrived = self.cluster.exchange(self, f"all_to_all of {x.numel()}", x.clone().unbind(0), _transpose)
            places: Sequence[Tensor] = out.unbind(0)
        else:
            arrived = self.cluster.exchange(
                self, "all_to_all of parts", torch.split(x.clone(), list(in_sizes)), _transpose
            )
            places = torch.split(out, list(out_sizes))
        for source, (place, part) in enumerate(zip(places, arrived, strict=True)):
            if place.numel() != part.numel():
                raise ValueError(
                    self.world.sign(f"rank {source} sent {part.numel()} elements, {place.numel()} were expected")
                )
            place.copy_(part)
        return CompletedOperation()

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        rows = self.cluster.exchange(self, f"all_gather of {x.numel()}", x.clone(), _stacked)
        self.count("all_gather", x)
        out.copy_(rows.view_as(out))
        return CompletedOperation()

    def broadcast(self, x: Tensor, source: int) -> Pending:
        rows = self.cluster.exchange(self, f"broadcast of {x.numel()} from {source}", x.clone(), _all_to_each)
        if self.world.rank == source:
            self.count("broadcast", x)
        else:
            x.copy_(rows[source])
        return CompletedOperation()

    def send(self, x: Tensor, to: int) -> Pending:
        check_other(self.world, to, "send to")
        self.cluster.check()
        self.count("send", x)
        self._numbers["to", to] += 1
        self.cluster.mail[self.place, self.world.rank, to, self._numbers["to", to]] = x.clone()
        return CompletedOperation()

    def receive(self, x: Tensor, source: int) -> Pending:
        check_other(self.world, source, "receive from")
        self._numbers["from", source] += 1
        key, mail = (self.place, source, self.world.rank, self._numbers["from", source]), self.cluster.mail

        def take() -> None:
            label = f"receive of {x.numel()} from worker {self.members[source]}"
            self.cluster.wait(self.member, label, lambda: key in mail)
            x.copy_(mail.pop(key))

        return _Receive(take)

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
    return Cluster(workers, hosts, clock).run(target)
