# SPDX-License-Identifier: Apache-2.0
"""Start the workers of this host, watch them, and leave none running.

torchrun finds the other hosts, numbers the workers and calls the methods below. The processes are ours for three
reasons: the exit code of a worker is reported unchanged, workers get `GRACE_S` seconds to stop instead of thirty, and
the children of a dead worker are killed. Every worker leads a session of its own, so that Ctrl-C reaches the launcher
alone.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.prestart import environment
from paceline.cli.launch.spawn import Command, WorkerProcess, reap, signal_session, spawn
from paceline.errors import PacelineError

GRACE_S = 5.0  # between the request to stop and SIGKILL
CHECK_EVERY_S = 1.0  # whether another host has failed
LINGER_S = 2.5  # that a host waits for the other ones to learn of its end; host 0 has the store
END_KEY = "paceline/end"  # why a host has left
NEEDLESS_KEY = "paceline/needless"  # counts the hosts that need the store no more
POLL_S = 0.02  # while workers are asked to stop


class OtherHostError(PacelineError, RuntimeError):
    """The run ended because of another host; the message says which and why."""


class EndNotes(threading.Thread):
    """The notes in the store of why a host leaves: this one's, and those of others.

    In a thread: torch's store has calls without a deadline, and none of them returns where a link is cut silently.

    Args:
        store: of the launchers, on host 0.
        others: hosts that have to end before this one, since it has the store; 0 on hosts that do not.

    Attributes:
        reason: why another host has left; "" before.
        answered_at: when the store answered last, on the monotonic clock, seconds.
    """

    def __init__(self, store: Any, others: int) -> None:
        super().__init__(name="paceline-hosts", daemon=True)
        self.reason, self.answered_at = "", time.monotonic()
        self._store, self._others = store, others
        self._own, self._linger_s, self._over = "", LINGER_S, threading.Event()

    def run(self) -> None:
        try:
            while not self.reason and not self._over.is_set():
                reason = self._store.get(END_KEY).decode() if self._store.check([END_KEY]) else ""
                self.reason, self.answered_at = reason, time.monotonic()
                self._over.wait(0.0 if reason else CHECK_EVERY_S)
            if self._own:
                self._store.set(END_KEY, self._own)
            needless = self._store.add(NEEDLESS_KEY, 0 if self._others else 1)
            deadline = time.monotonic() + self._linger_s
            while needless < self._others and time.monotonic() < deadline:
                time.sleep(POLL_S)
                needless = self._store.add(NEEDLESS_KEY, 0)
        except RuntimeError:  # its host is gone
            self.reason = "host 0 does not answer any more"

    def leave(self, reason: str = "", linger_s: float = LINGER_S) -> bool:
        """End; whether the thread has ended, which may hang in a call of the store.

        Args:
            reason: for the other hosts; "" if this one ends well.
            linger_s: how long the host that has the store waits for the others.
        """
        if not self._over.is_set():
            self._own, self._linger_s = reason, linger_s
            self._over.set()
        self.join((linger_s if self._others else LINGER_S) + POLL_S)
        return not self.is_alive()


class Agent(SimpleElasticAgent):
    """torchrun's agent with processes of our own.

    In addition to torchrun, a host whose worker failed writes this into the store, and the other hosts stop within
    `CHECK_EVERY_S` instead of waiting for it. Under a rule that survives a loss no worker is stopped, and the run is
    over when all have ended.
    """

    def __init__(
        self, spec: WorkerSpec, command: Command, cluster: LaunchCluster, workers: Sequence[WorkerProcess] = ()
    ) -> None:
        super().__init__(spec)
        self.command = command
        self.cluster = cluster
        self.hosts = cluster.hosts
        self.workers = list(workers)  # only ever appended to; the main thread reads it
        self.stop_signal: signal.Signals | None = None  # set by the main thread
        self.skip_grace = False  # set by a second Ctrl-C
        self.lost: dict[int, int] = {}  # rank -> exit code of lost workers; the run continues without them
        self.moved_at = time.monotonic()  # when it last went on; infinite while it starts workers
        self._notes: EndNotes | None = None
        self._swept: set[int] = set()  # ranks whose session was killed; their pids may be reused

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.hosts > 1:
            self._notes = EndNotes(self._store, self.hosts - 1 if worker_group.group_rank == 0 else 0)
            self._notes.start()
        self._raise_if_stopped()
        self.moved_at = math.inf
        for member in () if self.workers else worker_group.workers:  # none if prestarted
            coordinates = _coordinates(self.cluster, worker_group, member)
            self.workers.append(spawn(self.command, member.global_rank, coordinates))
        return {place: worker.process.pid for place, worker in enumerate(self.workers)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.moved_at = time.monotonic()
        self._raise_if_stopped()
        codes = [self._poll(worker) for worker in self.workers]
        failures = {
            worker.rank: ProcessFailure(place, worker.process.pid, code, os.devnull)
            for place, (worker, code) in enumerate(zip(self.workers, codes, strict=True))
            if code
        }
        for rank in failures.keys() - self.lost.keys():
            if self.command.may_lose(rank):
                self.lost[rank] = failures[rank].exitcode
        all_failed = len(failures) == len(codes) and self.hosts == 1
        if not all_failed:
            failures = {rank: failure for rank, failure in failures.items() if rank not in self.lost}
        if failures:
            self._publish_end(f"worker {min(failures)} on {socket.gethostname()} failed")
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if None in codes:
            self._check_other_hosts()
            return RunResult(state=WorkerState.HEALTHY)
        done = {worker.rank: None for worker in self.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=done)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self.stop(signal.SIGTERM)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        self.stop(death_sig)

    def stop(self, how: signal.Signals) -> None:
        """Ask every running worker to stop; after the grace period kill it and its children."""
        running = [worker for worker in self.workers if self._poll(worker) is None]
        for worker in running:
            signal_session(worker, how)
        deadline = time.monotonic() + GRACE_S
        while any(self._poll(worker) is None for worker in running):
            if self.skip_grace or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        for worker in running:
            if self._poll(worker) is None:
                signal_session(worker, signal.SIGKILL)
                reap(worker)
                self._swept.add(worker.rank)

    def _poll(self, worker: WorkerProcess) -> int | None:
        """The worker's exit code; kills what is left of its session at the end."""
        code: int | None = worker.process.poll()
        if code is not None and worker.rank not in self._swept:
            signal_session(worker, signal.SIGKILL)
            self._swept.add(worker.rank)
        return code

    def _exit_barrier(self) -> None:
        """Host 0, which has the store, waits for the other hosts' end."""
        if self._notes is not None:
            self._notes.leave(linger_s=self.cluster.timeout_s)

    def _publish_end(self, reason: str) -> None:
        """Tell the other hosts why this one leaves; host 0, which has the store, waits until they have read it."""
        if self._notes is not None:
            self._notes.leave(reason)

    def _check_other_hosts(self) -> None:
        """Raise when another host has left, or the store's does not answer."""
        if self._notes is None:
            return
        if self._notes.reason:
            raise OtherHostError(self._notes.reason)
        if time.monotonic() - self._notes.answered_at > self.cluster.timeout_s:
            raise OtherHostError(self.cluster.silent())

    def close(self) -> bool:
        """End what runs beside the workers; whether it has ended."""
        return self._notes is None or self._notes.leave()

    def kill(self) -> None:
        """Kill every worker at once; for the main thread, when the agent's is stuck."""
        self.skip_grace = True
        self.stop(signal.SIGKILL)

    def _raise_if_stopped(self) -> None:
        if self.stop_signal is not None:
            self._publish_end(f"stopped by {self.stop_signal.name} on {socket.gethostname()}")
            raise SignalException(f"stopped by {self.stop_signal.name}", self.stop_signal)


def _coordinates(cluster: LaunchCluster, group: WorkerGroup, member: Any) -> dict[str, str]:
    """A worker's variables, with torchrun's own."""
    spec = group.spec
    master = (str(group.master_addr), str(group.master_port))
    coordinates = cluster.coordinates(member.local_rank, member.global_rank, member.world_size, master)
    return coordinates | environment(spec.rdzv_handler.get_run_id())
