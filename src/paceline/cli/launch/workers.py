# SPDX-License-Identifier: Apache-2.0
"""Start the workers of this host, watch them, and leave none running.

torchrun finds the other hosts, numbers the workers and calls the methods below. The processes are ours for three
reasons: the exit code of a worker is reported unchanged, workers get `GRACE_S` seconds to stop instead of thirty, and
the children of a dead worker are killed. Every worker leads a session of its own, so that Ctrl-C reaches the launcher
alone.
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
from paceline.cli.launch.prestart import environment
from paceline.cli.launch.spawn import Command, WorkerProcess, signal_session, spawn
from paceline.errors import PacelineError

GRACE_S = 5.0  # between the request to stop and SIGKILL
CHECK_EVERY_S = 1.0  # whether another host has failed
LINGER_S = 2.5  # that host 0 keeps the store open, for the other hosts to learn of the end
END_KEY, READ_KEY = "paceline/end", "paceline/end-read"
POLL_S = 0.02  # while workers are asked to stop


class OtherHostError(PacelineError, RuntimeError):
    """The run ended because of another host; the message says which and why."""


class Agent(SimpleElasticAgent):
    """torchrun's agent with processes of our own.

    In addition to torchrun, a host whose worker failed writes this into the store, and the other hosts stop within
    `CHECK_EVERY_S` instead of waiting for it. Under a rule that survives a loss no worker is stopped, and the run is
    over when all have ended.
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
        self.skip_grace = False  # set by a second Ctrl-C
        self.lost: dict[int, int] = {}  # rank -> exit code of lost workers; the run continues without them
        self._check_at = 0.0
        self._swept: set[int] = set()  # ranks whose session was killed; their pids may be reused

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._raise_if_stopped()
        for member in () if self.workers else worker_group.workers:  # none if prestarted
            coordinates = _coordinates(self.cluster, worker_group, member)
            self.workers.append(spawn(self.command, member.global_rank, coordinates))
        return {place: worker.process.pid for place, worker in enumerate(self.workers)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
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
                worker.process.wait()
                self._swept.add(worker.rank)

    def _poll(self, worker: WorkerProcess) -> int | None:
        """The worker's exit code; kills what is left of its session at the end."""
        code = worker.process.poll()
        if code is not None and worker.rank not in self._swept:
            signal_session(worker, signal.SIGKILL)
            self._swept.add(worker.rank)
        return code

    def _publish_end(self, reason: str) -> None:
        """Tell the other hosts why this one leaves; host 0, which has the store, waits until they have read it."""
        if self.hosts == 1 or self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store's own host may be gone already
            self._store.set(END_KEY, reason)
            deadline = time.monotonic() + LINGER_S
            while self._worker_group.group_rank == 0 and time.monotonic() < deadline:
                if self._store.add(READ_KEY, 0) >= self.hosts - 1:
                    return
                time.sleep(POLL_S)

    def _check_other_hosts(self) -> None:
        """Raise when another host has left."""
        if self.hosts == 1 or self._store is None or time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + CHECK_EVERY_S
        reason = ""
        try:
            if self._store.check([END_KEY]):
                reason = self._store.get(END_KEY).decode()
                self._store.add(READ_KEY, 1)
        except RuntimeError as error:
            raise OtherHostError("host 0 does not answer any more") from error
        if reason:
            raise OtherHostError(reason)

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
