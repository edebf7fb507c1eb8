# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of this host, watches them, and leaves none behind.

torchrun's machinery finds the other hosts, numbers the workers and calls the methods below; the
processes themselves are ours, for three reasons: a worker's exit code is seen as it was, those that
must stop get `GRACE_S` seconds and not thirty, and whatever a dead worker had started dies too.
Every worker leads a session of its own, so that Ctrl-C reaches the launcher alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
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
from paceline.cli.launch.prestart import environment as of_torchrun
from paceline.cli.launch.spawn import Command, WorkerProcess, signal_session, spawn
from paceline.errors import PacelineError

GRACE_S = 5.0  # between the request to stop and the order
ASK_EVERY_S = 1.0  # whether another host has failed
LINGER_S = 2.5  # that host 0 stays for the others to learn of the end
END_KEY, READ_KEY = "paceline/end", "paceline/end-read"
POLL_S = 0.02  # while workers are asked to stop


class OtherHostError(PacelineError, RuntimeError):
    """The run ended because of another host; the message says which and why."""


class Agent(SimpleElasticAgent):
    """torchrun's agent with processes of our own.

    What torchrun leaves out: a host whose worker failed writes so into the store through which the
    hosts met, and the others stop within `ASK_EVERY_S` instead of waiting for the dead. Where the
    rule lets the others go on without it, nobody is stopped, and the run is over when all have ended.
    """

    def __init__(
        self, spec: WorkerSpec, command: Command, cluster: LaunchCluster, workers: Sequence[WorkerProcess] = ()
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=cluster.timeout_s)
        self.command = command
        self.cluster = cluster
        self.hosts = cluster.hosts
        self.workers = list(workers)  # only ever appended to; the main thread reads it
        self.stop_signal: signal.Signals | None = None  # set by the main thread
        self.impatient = False  # set by a second Ctrl-C: no more grace
        self.lost: dict[int, int] = {}  # rank -> return code of those without whom the others went on
        self._ask_at = 0.0
        self._gone: set[int] = set()  # ranks whose session has been swept; their ids may be reused

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._heed_stop()
        for member in () if self.workers else worker_group.workers:  # they may have been started already
            coordinates = _coordinates(self.cluster, worker_group, member)
            self.workers.append(spawn(self.command, member.global_rank, coordinates))
        return {place: worker.process.pid for place, worker in enumerate(self.workers)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._heed_stop()
        codes = [self._poll(worker) for worker in self.workers]
        failures = {
            worker.rank: ProcessFailure(place, worker.process.pid, code, os.devnull)
            for place, (worker, code) in enumerate(zip(self.workers, codes, strict=True))
            if code
        }
        for rank in failures.keys() - self.lost.keys():
            if self.command.may_lose(rank):
                self.lost[rank] = failures[rank].exitcode
        nobody_left = len(failures) == len(codes) and self.hosts == 1
        if not nobody_left:
            failures = {rank: failure for rank, failure in failures.items() if rank not in self.lost}
        if failures:
            self._tell(f"worker {min(failures)} on {socket.gethostname()} failed")
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if None in codes:
            self._ask()
            return RunResult(state=WorkerState.HEALTHY)
        done = {worker.rank: None for worker in self.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=done)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self.stop(signal.SIGTERM)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        self.stop(death_sig)

    def stop(self, how: signal.Signals) -> None:
        """Ask every worker that still runs to stop, and after the grace end it and its children."""
        running = [worker for worker in self.workers if self._poll(worker) is None]
        for worker in running:
            signal_session(worker, how)
        deadline = time.monotonic() + GRACE_S
        while any(self._poll(worker) is None for worker in running):
            if self.impatient or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        for worker in running:
            if self._poll(worker) is None:
                signal_session(worker, signal.SIGKILL)
                worker.process.wait()
                self._gone.add(worker.rank)

    def _poll(self, worker: WorkerProcess) -> int | None:
        """The worker's exit code; when it is first seen, what the worker left behind is ended."""
        code = worker.process.poll()
        if code is not None and worker.rank not in self._gone:
            signal_session(worker, signal.SIGKILL)
            self._gone.add(worker.rank)
        return code

    def _tell(self, what: str) -> None:
        """Let the other hosts know why this one leaves.

        Host 0 keeps the store, so it stays for a moment until the others have read it.
        """
        if self.hosts == 1 or self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store's own host may be gone already
            self._store.set(END_KEY, what)
            deadline = time.monotonic() + LINGER_S
            while self._worker_group.group_rank == 0 and time.monotonic() < deadline:
                if self._store.add(READ_KEY, 0) >= self.hosts - 1:
                    return
                time.sleep(POLL_S)

    def _ask(self) -> None:
        """Leave when another host has left."""
        if self.hosts == 1 or self._store is None or time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + ASK_EVERY_S
        what = ""
        try:
            if self._store.check([END_KEY]):
                what = self._store.get(END_KEY).decode()
                self._store.add(READ_KEY, 1)
        except RuntimeError as error:
            raise OtherHostError("host 0 does not answer any more") from error
        if what:
            raise OtherHostError(what)

    def kill(self) -> None:
        """End every worker at once. For the main thread, when the agent's own is stuck."""
        self.impatient = True
        self.stop(signal.SIGKILL)

    def _heed_stop(self) -> None:
        if self.stop_signal is not None:
            self._tell(f"stopped by {self.stop_signal.name} on {socket.gethostname()}")
            raise SignalException(f"stopped by {self.stop_signal.name}", self.stop_signal)


def _coordinates(cluster: LaunchCluster, group: WorkerGroup, member: Any) -> dict[str, str]:
    """The variables by which a worker knows who it is, and torchrun's own."""
    spec = group.spec
    master = (str(group.master_addr), str(group.master_port))
    return cluster.coordinates(member.local_rank, member.global_rank, member.world_size, master) | of_torchrun(
        spec.rdzv_handler.get_run_id()
    )
