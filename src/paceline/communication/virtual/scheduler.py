# SPDX-License-Identifier: Apache-2.0
"""The scheduler of virtual workers: whose turn it is, who waits for what, and where they meet.

One worker runs at a time, in a thread of its own. When it has to wait, it hands the turn to the next worker, in rank
order, that can continue: one that waits for nothing, or for what has arrived by now. When no worker can, the run is
deadlocked, and every worker gets an error that names who waits for what.
:mod:`paceline.communication.virtual.transport` makes a transport of it.
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
    """What comes to its end with a worker's program: closed after a good one, abandoned after a failed one."""

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Belonging(Protocol):
    """More that a worker takes for its own process's: saved before it yields its turn, restored when it resumes."""

    def take(self) -> None: ...

    def put(self) -> None: ...


class _Globals:
    """What one worker sees as its own process's state, saved and restored with its turn."""

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
        self.waits_for: str | None = None  # the exchange at which it stands
        self.call = ""  # the user's call that the exchange belongs to
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
    """The workers, the turn and the exchanges under way.

    Args:
        size: number of workers.
        hosts: what each worker takes for the name of its host; all are on this one by default.
        clock: the simulated time, for what happens while all workers wait.
    """

    def __init__(self, size: int, hosts: Sequence[str] | None = None, clock: Clock | None = None) -> None:
        self.size = size
        self.timed = clock is not None  # else every minibatch takes a second, and a message no time
        self.clock = clock if clock is not None else Clock()
        self.clock.restart()
        self.shared: dict[str, Any] = {}  # what virtual workers put where others find it
        self.hosts = tuple(hosts) if hosts is not None else (World().host,) * size
        self.workers = [_Worker(rank, _Globals()) for rank in range(size)]
        self.away_s = [0.0] * size  # seconds in which other workers ran, since each worker's first turn
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
        """Run other workers until `ready()`."""
        self.check()
        if not ready():
            worker = self.workers[rank]
            worker.waits_for, worker.ready = label, ready
            self._pass_on(rank)
            worker.waits_for = None

    def keep(self, rank: int, belonging: Belonging) -> None:
        """From now on `belonging` moves with the turn of worker `rank`."""
        self.workers[rank].globals.belongings.append(belonging)

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
        """Run the next worker that can continue, and wait for the turn to return."""
        heir = self._heir(rank)
        me = self.workers[rank]
        if heir is None:
            self._broken = "nobody can go on: " + self._situation()
        elif heir is not me:
            me.globals.take()
            left = time.perf_counter()
            heir.go.release()
            me.go.acquire()
            self.away_s[rank] += time.perf_counter() - left
            me.globals.put()
        self.check()

    def _heir(self, rank: int) -> _Worker | None:
        """The next worker that can go on; while there is none, simulated time passes."""
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
        """The body of a worker's thread: wait for its turn, work, yield."""
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

    def run(self, enter: Callable[[Cluster, int], None], target: Callable[[], Result]) -> list[Result | None]:
        """Run `enter(cluster, rank)` and `target` in every worker; the results in rank order, or the first failure."""
        results: list[Result | None] = [None] * self.size
        before = _Globals()
        threads = [
            threading.Thread(target=self.run_worker, args=(rank, enter, target, results), name=f"worker-{rank}")
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
