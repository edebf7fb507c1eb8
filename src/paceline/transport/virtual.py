# SPDX-License-Identifier: Apache-2.0
"""N workers in one process: each its own thread, model and rank, one running at a time.

A *baton* says whose turn it is. A worker keeps it until it comes to an exchange; there it lays down what it brings and
hands the baton to the next worker, in rank order, that can go on. The last to arrive finishes the exchange for all,
with sums taken in rank order. With the baton, what a program believes to own alone is swapped: the global random
generators of torch (and of every CUDA device in use), NumPy and `random`, `sys.argv`, `sys.stdout` and the module
`__main__`. So a run repeats bit for bit, and a program that was written for one process runs unchanged.

There are no timeouts here: when nobody can go on, that is seen at once, and the error says who waits for what.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.errors import PeerLostError
from paceline.transport.base import Done, Pending, Transport
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
        self.finished = False
        self.error: BaseException | None = None


class Cluster:
    """The workers, the baton and the exchange under way."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers = [_Worker(rank, _Globals()) for rank in range(size)]
        self._brought: dict[int, Any] = {}
        self._combine: Combine | None = None
        self._results: list[Any] = []
        self._over = threading.Semaphore(0)
        self.owners: dict[int, tuple[int, Any]] = {}  # id of a parameter -> (rank that attached it, the parameter)
        self.endings: list[list[Closable]] = [[] for _ in range(size)]  # what each worker has to close at its end
        self._broken: str | None = None

    def meet(self, rank: int, label: str, brings: Any, combine: Combine) -> Any:
        """Wait until every worker has come with the same `label`; then this worker's part of `combine(brought)`."""
        if self._broken is not None:
            raise PeerLostError(self._broken)
        worker = self.workers[rank]
        self._brought[rank], self._combine, worker.waits_for = brings, combine, label
        if len(self._brought) == self.size:
            self._finish_exchange()
        else:
            self._pass_on(rank)
        if self._broken is not None:
            raise PeerLostError(self._broken)
        return self._results[rank]

    def _finish_exchange(self) -> None:
        labels = [str(worker.waits_for) for worker in self.workers]
        if len(set(labels)) > 1:
            self._broken = "the workers came to different exchanges: " + self._situation()
            raise PeerLostError(self._broken)
        assert self._combine is not None
        self._results = self._combine([self._brought[rank] for rank in range(self.size)])
        self._brought = {}
        for worker in self.workers:
            worker.waits_for = None

    def _pass_on(self, rank: int) -> None:
        """Give the baton to the next worker that can go on, and wait for its return."""
        heir = self._heir(rank)
        me = self.workers[rank]
        if heir is None:
            self._broken = "nobody can go on: " + self._situation()
            return
        me.globals.take()
        heir.go.release()
        me.go.acquire()
        me.globals.put()

    def _heir(self, rank: int) -> _Worker | None:
        for step in range(1, self.size + 1):
            worker = self.workers[(rank + step) % self.size]
            if not worker.finished and (worker.waits_for is None or self._broken is not None):
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
        _here.transport = VirtualTransport(self, rank)
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


class VirtualTransport(Transport):
    """One virtual worker's connection: every operation is one meeting."""

    name = "virtual"

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster = cluster
        size = cluster.size
        host = World().host
        self.world = World(rank, size, rank, size, host, (host,) * size)
        self.bytes_sent = 0

    def clone(self) -> VirtualTransport:
        """A connection with a byte count of its own; all of a worker's connections share the baton."""
        return VirtualTransport(self.cluster, self.world.rank)

    def _meet(self, label: str, brings: Any, combine: Combine) -> Any:
        return self.cluster.meet(self.world.rank, label, brings, combine)

    def all_reduce(self, x: Tensor) -> Pending:
        self.count("all_reduce", x)
        total = self._meet(f"all_reduce of {x.numel()}", x, _sum_in_rank_order)
        x.copy_(total)
        return Done()

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        self.count("all_to_all", x)
        rows = self._meet(f"all_to_all of {x.numel()}", x, _transpose)
        for row, arrived in zip(out, rows, strict=True):
            row.copy_(arrived)
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

    def close(self) -> None:
        """The cluster ends with its threads."""


def _sum_in_rank_order(brought: list[Tensor]) -> list[Tensor]:
    total = brought[0].clone()
    for x in brought[1:]:
        total.add_(x.to(total.device))
    return [total] * len(brought)


def _transpose(brought: list[Tensor]) -> list[list[Tensor]]:
    copies = [x.clone() for x in brought]  # a worker may reuse its tensor before another has read it
    return [[x[rank] for x in copies] for rank in range(len(brought))]


def _everybody_gets_all(brought: list[Tensor]) -> list[list[Tensor]]:
    return [brought] * len(brought)


def run(workers: int, target: Callable[[], Result]) -> Sequence[Result | None]:
    """Run `target()` in `workers` virtual workers; the results in rank order.

    Inside, `paceline.attach` finds the virtual cluster by itself. Every worker starts with the random state that the
    caller had, as N processes that set the same seed would. The first error of a worker is raised here.

    Args:
        workers: N, at least 1.
        target: called once in each worker, without arguments; whatever it builds is that worker's own.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if current() is not None:
        raise ValueError("a virtual worker cannot start virtual workers of its own")
    return Cluster(workers).run(target)
