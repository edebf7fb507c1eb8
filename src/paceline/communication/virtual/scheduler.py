# SPDX-License-Identifier: Apache-2.0
"""The scheduler of virtual workers, and their exchanges.

One worker runs at a time, in a thread of its own. When it has to wait, it passes the turn to the next worker, in rank
order, that can continue: one that waits for nothing, or whose exchange is complete. If no worker can, the run is
deadlocked, and every worker gets an error that says who waits for what. :mod:`paceline.communication.virtual.transport`
is the transport.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

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

    def abandon(self) -> None: ...


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


class _Exchange:
    """One exchange among some workers, until the last of them contributes."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.contributions: dict[int, Any] = {}
        self.results: dict[int, Any] = {}


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
        self._exchanges: dict[str, _Exchange] = {}
        self.mail: dict[tuple[str, int, int, int], Tensor] = {}  # (place, from, to, number) -> the message
        self._over = threading.Semaphore(0)
        self.owners: dict[int, tuple[int, Any]] = {}  # id of a parameter -> (rank that attached it, the parameter)
        self.endings: list[list[Closable]] = [[] for _ in range(size)]  # closed with each worker's program
        self._broken: str | None = None

    def exchange(
        self, rank: int, label: str, contribution: Any, combine: Combine, members: Sequence[int] = (), place: str = ""
    ) -> Any:
        """Take part in an exchange; returns this worker's result once every member has contributed.

        Args:
            rank: of this worker.
            label: describes the exchange; the same on all members.
            contribution: this worker's.
            combine: makes the list of results from the list of contributions, both in the order of `members`.
            members: ranks that take part; all by default.
            place: identifies this set of members.
        """
        self.check()
        exchange = self._exchanges.setdefault(place, _Exchange(members or range(self.size)))
        exchange.contributions[rank] = contribution
        worker = self.workers[rank]
        worker.waits_for, worker.ready = label, lambda: rank in exchange.results
        if len(exchange.contributions) == len(exchange.members):
            del self._exchanges[place]
            self._finish_exchange(exchange, combine)
        else:
            self._pass_on(rank)
        worker.waits_for = None
        return exchange.results[rank]

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

    def _finish_exchange(self, exchange: _Exchange, combine: Combine) -> None:
        labels = {self.workers[rank].waits_for for rank in exchange.members}
        if len(labels) > 1:
            self._broken = "the workers came to different exchanges: " + self._situation()
            raise PeerLostError(self._broken)
        results = combine([exchange.contributions[rank] for rank in exchange.members])
        exchange.results = dict(zip(exchange.members, results, strict=True))

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

    def run_worker(
        self,
        rank: int,
        enter: Callable[[Cluster, int], None],
        target: Callable[[], Result],
        results: list[Result | None],
    ) -> None:
        """The body of a worker's thread."""
        me = self.workers[rank]
        me.go.acquire()
        me.globals.put()
        enter(self, rank)
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
                ending.abandon()
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

    def run(self, enter: Callable[[Cluster, int], None], target: Callable[[], Result]) -> list[Result | None]:
        """Run `enter(cluster, rank)` and `target` in every worker; the results in rank order, or the first failure."""
        results: list[Result | None] = [None] * self.size
        before = _Globals()
        threads = [
            threading.Thread(
                target=self.run_worker, args=(rank, enter, target, results), name=f"worker-{rank}", daemon=True
            )
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
        self._raise_first()
        return results

    def _raise_first(self) -> None:
        errors = [worker.error for worker in self.workers if worker.error is not None]
        if errors:
            causes = [e for e in errors if not isinstance(e, PeerLostError)]
            raise (causes or errors)[0]
