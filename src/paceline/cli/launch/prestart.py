# SPDX-License-Identifier: Apache-2.0
"""Start the workers of a single host before the launcher loads torch, so that both load it at the same time.

On one host the ranks and the port of the launcher's store are known from the start. The launcher listens at that port
at once, so that no other program takes it; workers that connect before the store exists wait in the socket's queue.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.signals import SignalListener
from paceline.cli.launch.spawn import Command, WorkerProcess, reap, signal_session, spawn

LOOPBACK = "127.0.0.1"
BACKLOG = 2048  # workers connect all at once


@dataclass
class PrestartedWorkers:
    """Workers that run before the launcher's store exists.

    Attributes:
        listener: of the store.
        signals: received meanwhile.
        run_id: of this start.
        workers: started so far.
    """

    listener: socket.socket
    signals: SignalListener
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    workers: list[WorkerProcess] = field(default_factory=list)

    def start(self, cluster: LaunchCluster, command: Command) -> None:
        master = (LOOPBACK, str(self.listener.getsockname()[1]))
        began = {"PACELINE_BEGAN": repr(time.time())}  # for all, so that they see the same files
        for rank in range(cluster.workers):
            coordinates = cluster.coordinates(rank, rank, cluster.workers, master) | environment(self.run_id) | began
            self.workers.append(spawn(command, rank, coordinates))

    def end(self) -> None:
        """Kill those that still run."""
        for worker in self.workers:
            if worker.process.poll() is None:
                signal_session(worker, signal.SIGKILL)
                reap(worker)


@contextlib.contextmanager
def prestart(cluster: LaunchCluster, command: Command) -> Iterator[PrestartedWorkers | None]:
    """Start the workers of a run on one host; None with several hosts, which need a rendezvous first.

    Collects signals until the launcher listens for them. No worker outlives the `with` block.
    """
    if cluster.hosts > 1 or cluster.master is not None:
        yield None
        return
    with SignalListener() as signals, socket.create_server((LOOPBACK, 0), backlog=BACKLOG) as listener:
        workers = PrestartedWorkers(listener, signals)
        try:
            workers.start(cluster, command)
            yield workers
        finally:
            workers.end()


def environment(run_id: str) -> dict[str, str]:
    """Torchrun's own variables: the store is the launcher's, and torchrun restarts no worker."""
    return {
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
