# SPDX-License-Identifier: Apache-2.0
"""N workers in one process: each its own thread, model and rank, one running at a time.

A *baton* says whose turn it is. A worker keeps it until it comes to an exchange; there it lays down what it brings and
hands the baton to the next worker, in rank order, that can go on. The last to arrive finishes the exchange for all,
with sums taken in rank order; in a part of the cluster that is the last of the part. With the baton, what a program
believes to own alone is swapped: the global random generators of torch (and of every CUDA device in use), NumPy and
`random`, `sys.argv`, `sys.stdout` and the module `__main__`. So a run repeats bit for bit, and a program that was
written for one process runs unchanged.

There are no timeouts here: when nobody can go on, that is seen at once, and the error says who waits for what.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.errors import PeerLostError
from paceline.transport.base import Done, Pending, Transport, check_sizes, world_within
from paceline.world import World

Result = TypeVar("Result")
Combine = Callable[[list[Any]], list[Any]]

_here = threading.local()


def current() -> VirtualTransport | None:
    """The transport of the virtual worker that runs this thread, or None outside of :func:`run`."""
    return getattr(_here, "transport", None)


class Closable(Protocol):
    """What comes to its end with a worker's program: closed after a good one, abandoned after a failed one."""

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class _Globals:
    """What one worker sees as its own process's state, taken and put back with the baton."""

    def __init__(self) -> None:
        self.take()

    def take(self) -> None:
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self.numpy = np.random.get_state()
        self.random = random.getstate()
        self.argv, self.stdout, self.main = sys.argv, sys.stdout, sys.modules["__main__"]

    def put(self) -> None:
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.random)
        sys.argv, sys.stdout, sys.modules["__main__"] = self.argv, self.stdout, self.main


class _Worker:
    def __init__(self, rank: int, state: _Globals) -> None:
        self.rank = rank
        self.globals = state
        self.go = threading.Semaphore(0)
        self.waits_for: str | None = None  # the exchange at which it stands
        self.ready: Callable[[], bool] = lambda: False  # whether what it waits for is there
        self.finished = False
        self.error: BaseException | None = None


class _Meeting:
    """One exchange among some workers, until the last of them has come."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.brought: dict[int, Any] = {}
        self.results: dict[int, Any] = {}


class Cluster:
    """The workers, the baton and the exchanges under way.

    Args:
        size: number of workers.
        hosts: what each worker takes for the name of its host; all are on this one by default.
    """

    def __init__(self, size: int, hosts: Sequence[str] | None = None) -> None:
        self.size = size
        self.hosts = tuple(hosts) if hosts is not None else (World().host,) * size
        self.workers = [_Worker(rank, _Globals()) for rank in range(size)]
        self._meetings: dict[str, _Meeting] = {}
        self.mail: dict[tuple[str, int, int, int], Tensor] = {}  # (place, from, to, number) -> what was sent
        self._over = threading.Semaphore(0)
        self.owners: dict[int, tuple[int, Any]] = {}  # id of a parameter -> (rank that attached it, the parameter)
        self.endings: list[list[Closable]] = [[] for _ in range(size)]  # what each worker has to close at its end
        self._broken: str | None = None

    def meet(
        self, rank: int, label: str, brings: Any, combine: Combine, members: Sequence[int] = (), place: str = ""
    ) -> Any:
        """Wait until every member has come to `place` with the same `label`; then this one's part of the result.

        Args:
            rank: who comes.
            label: what for.
            brings: its contribution.
            combine: makes a list of results from the list of contributions, both in the order of `members`.
            members: who has to come; everybody by default.
            place: name of the meeting place of these members.
        """
        self.check()
        meeting = self._meetings.setdefault(place, _Meeting(members or range(self.size)))
        meeting.brought[rank] = brings
        worker = self.workers[rank]
        worker.waits_for, worker.ready = label, lambda: rank in meeting.results
        if len(meeting.brought) == len(meeting.members):
            del self._meetings[place]
            self._finish_exchange(meeting, combine)
        else:
            self._pass_on(rank)
        worker.waits_for = None
        return meeting.results[rank]

    def wait(self, rank: int, label: str, ready: Callable[[], bool]) -> None:
        """Let the others work until `ready()`."""
        self.check()
        if not ready():
            worker = self.workers[rank]
            worker.waits_for, worker.ready = label, ready
            self._pass_on(rank)
            worker.waits_for = None

    def check(self) -> None:
        """Raise what broke the cluster, if anything has."""
        if self._broken is not None:
            raise PeerLostError(self._broken)

    def _finish_exchange(self, meeting: _Meeting, combine: Combine) -> None:
        labels = {self.workers[rank].waits_for for rank in meeting.members}
        if len(labels) > 1:
            self._broken = "the workers came to different exchanges: " + self._situation()
            raise PeerLostError(self._broken)
        results = combine([meeting.brought[rank] for rank in meeting.members])
        meeting.results = dict(zip(meeting.members, results, strict=True))

    def _pass_on(self, rank: int) -> None:
        """Give the baton to the next worker that can go on, and wait for its return."""
        heir = self._heir(rank)
        me = self.workers[rank]
        if heir is None:
            self._broken = "nobody can go on: " + self._situation()
        elif heir is not me:
            me.globals.take()
            heir.go.release()
            me.go.acquire()
            me.globals.put()
        self.check()

    def _heir(self, rank: int) -> _Worker | None:
        for step in range(1, self.size + 1):
            worker = self.workers[(rank + step) % self.size]
            if not worker.finished and (worker.waits_for is None or worker.ready() or self._broken is not None):
                return worker
        return None

    def _situation(self) -> str:
        parts = []
        for worker in self.workers:
            if worker.error is not None:
                where = f"failed with {type(worker.error).__name__}: {worker.error}"
            elif worker.finished:
                where = "has ended"
            else:
                where = f"waits at {worker.waits_for}" if worker.waits_for else "is running"
            parts.append(f"worker {worker.rank} {where}")
        return "; ".join(parts)

    def run_worker(self, rank: int, target: Callable[[], Result], results: list[Result | None]) -> None:
        """The body of a worker's thread: wait for the baton, work, hand it on."""
        me = self.workers[rank]
        me.go.acquire()
        me.globals.put()
        _here.transport = VirtualTransport(self, range(self.size), rank)
        try:
            try:
                results[rank] = target()
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise
            for ending in list(self.endings[rank]):
                ending.close()
        except BaseException as error:  # handed to the caller of run()
            me.error = error
            for ending in list(self.endings[rank]):
                ending.abandon()
        finally:
            me.finished = True
            heir = self._heir(rank)
            if heir is None and any(not w.finished for w in self.workers):
                self._broken = "nobody can go on: " + self._situation()
                heir = self._heir(rank)
            if heir is None:
                self._over.release()
            else:
                heir.go.release()

    def run(self, target: Callable[[], Result]) -> list[Result | None]:
        """Run `target` in every worker; the results in rank order, or the first failure."""
        results: list[Result | None] = [None] * self.size
        before = _Globals()
        threads = [
            threading.Thread(target=self.run_worker, args=(rank, target, results), name=f"worker-{rank}")
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        try:
            self.workers[0].go.release()
            self._over.acquire()
            for thread in threads:
                thread.join()
        finally:
            before.put()
        self._raise_first()
        return results

    def _raise_first(self) -> None:
        errors = [worker.error for worker in self.workers if worker.error is not None]
        if errors:
            causes = [e for e in errors if not isinstance(e, PeerLostError)]
            raise (causes or errors)[0]


class _Receive:
    """A message on its way, or not even sent yet."""

    def __init__(self, transport: VirtualTransport, x: Tensor, source: int, number: int) -> None:
        self._transport, self._x, self._source, self._number = transport, x, source, number

    def wait(self) -> None:
        """Let the others work until the message is there."""
        if self._number >= 0:
            self._transport.take(self._x, self._source, self._number)
            self._number = -1


class VirtualTransport(Transport):
    """One virtual worker's connection: every operation is one meeting.

    Args:
        cluster: the workers.
        members: ranks in the cluster of those that this connection joins, in its own order.
        rank: this worker's place among them.
        parent: the connection that this one is a part of.
        place: the same for all members, and for no other connection among other members.
    """

    name = "virtual"

    def __init__(
        self,
        cluster: Cluster,
        members: Sequence[int],
        rank: int,
        parent: VirtualTransport | None = None,
        place: str = "",
    ) -> None:
        hosts = cluster.hosts
        own = members[rank]
        mine = World(own, cluster.size, 0, 1, hosts[own], hosts)
        super().__init__(world_within(mine, members), parent)
        self.cluster, self.members = cluster, tuple(members)
        self._place, self._parts = place, 0
        self._numbers: Counter[tuple[str, int]] = Counter()  # messages to and from each worker

    def clone(self) -> VirtualTransport:
        """A connection with a byte count of its own; all of a worker's connections share the baton."""
        return VirtualTransport(self.cluster, self.members, self.world.rank)

    def _meet(self, label: str, brings: Any, combine: Combine) -> Any:
        if self._place:
            label += f" among workers {', '.join(str(rank) for rank in self.members)}"
        return self.cluster.meet(self.members[self.world.rank], label, brings, combine, self.members, self._place)

    def open_channels(self, number: int) -> None:
        """Nothing to open: an operation is over when it was started."""

    def channel(self, k: int) -> Transport:
        return self

    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        number, mine = self._group_of(groups)
        self._meet(f"part into {groups!r}", None, _everybody_gets_all)
        self._parts += 1
        members = [self.members[rank] for rank in mine]
        place = f"{self._place}/{self._parts}.{number}"
        return VirtualTransport(self.cluster, members, mine.index(self.world.rank), self, place)

    def all_reduce(self, x: Tensor) -> Pending:
        self.count("all_reduce", x)
        total = self._meet(f"all_reduce of {x.numel()}", x, _sum_in_rank_order)
        x.copy_(total)
        return Done()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        self.count("reduce_scatter", x)
        total = self._meet(f"reduce_scatter of {x.numel()}", x, _sum_in_rank_order)
        out.copy_(total[self.world.rank])
        return Done()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Pending:
        check_sizes(out, x, out_sizes, in_sizes, self.world.size)
        self.count("all_to_all", x, in_sizes[self.world.rank] if in_sizes is not None else None)
        if in_sizes is None or out_sizes is None:
            arrived = self._meet(f"all_to_all of {x.numel()}", x.clone().unbind(0), _transpose)
            places: Sequence[Tensor] = out.unbind(0)
        else:
            arrived = self._meet("all_to_all of parts", torch.split(x.clone(), list(in_sizes)), _transpose)
            places = torch.split(out, list(out_sizes))
        for source, (place, part) in enumerate(zip(places, arrived, strict=True)):
            if place.numel() != part.numel():
                raise ValueError(
                    self.world.sign(f"rank {source} sent {part.numel()} elements, {place.numel()} were expected")
                )
            place.copy_(part)
        return Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        self.count("all_gather", x)
        rows = self._meet(f"all_gather of {x.numel()}", x.clone(), _everybody_gets_all)
        for row, arrived in zip(out, rows, strict=True):
            row.copy_(arrived)
        return Done()

    def broadcast(self, x: Tensor, source: int) -> Pending:
        if self.world.rank == source:
            self.count("broadcast", x)
        rows = self._meet(f"broadcast of {x.numel()} from {source}", x.clone(), _everybody_gets_all)
        if self.world.rank != source:
            x.copy_(rows[source])
        return Done()

    def send(self, x: Tensor, to: int) -> Pending:
        self._other(to, "send to")
        self.cluster.check()
        self.count("send", x)
        self._numbers["to", to] += 1
        self.cluster.mail[self._place, self.world.rank, to, self._numbers["to", to]] = x.clone()
        return Done()

    def receive(self, x: Tensor, source: int) -> Pending:
        self._other(source, "receive from")
        self._numbers["from", source] += 1
        return _Receive(self, x, source, self._numbers["from", source])

    def take(self, x: Tensor, source: int, number: int) -> None:
        """Wait for message `number` of worker `source`, and copy it into `x`."""
        key = (self._place, source, self.world.rank, number)
        label = f"receive of {x.numel()} from worker {self.members[source]}"
        self.cluster.wait(self.members[self.world.rank], label, lambda: key in self.cluster.mail)
        x.copy_(self.cluster.mail.pop(key))

    def close(self) -> None:
        """The cluster ends with its threads."""


def _sum_in_rank_order(brought: list[Tensor]) -> list[Tensor]:
    total = brought[0].clone()
    for x in brought[1:]:
        total.add_(x.to(total.device))
    return [total] * len(brought)


def _transpose(brought: list[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[parts[place] for parts in brought] for place in range(len(brought))]


def _everybody_gets_all(brought: list[Any]) -> list[list[Any]]:
    return [brought] * len(brought)


def run(workers: int, target: Callable[[], Result], hosts: Sequence[str] | None = None) -> Sequence[Result | None]:
    """Run `target()` in `workers` virtual workers; the results in rank order.

    Inside, `paceline.attach` finds the virtual cluster by itself. Every worker starts with the random state that the
    caller had, as N processes that set the same seed would. The first error of a worker is raised here.

    Args:
        workers: N, at least 1.
        target: called once in each worker, without arguments; whatever it builds is that worker's own.
        hosts: a name for each worker's host, to try what depends on who is near whom; all are on this one by default.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if hosts is not None and len(hosts) != workers:
        raise ValueError(f"hosts must name a host for each of {workers} workers, got {len(hosts)}")
    if current() is not None:
        raise ValueError("a virtual worker cannot start virtual workers of its own")
    return Cluster(workers, hosts).run(target)
