# SPDX-License-Identifier: Apache-2.0
"""The workers of a single host start before the launcher has loaded torch, so that both load at the same time.

On one host everything that a worker has to know is known at once: its rank, and the port where the launcher will have
its store. So that nobody takes that port, the launcher listens at it from the beginning; workers that come before the
store is there wait in the socket's queue.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.signals import SignalListener
from paceline.cli.launch.spawn import Command, WorkerProcess, signal_session, spawn

LOOPBACK = "127.0.0.1"
BACKLOG = 2048  # workers connect all at once


@dataclass
class Begun:
    """What was begun.

    Attributes:
        door: where the store will be.
        signals: that were heard meanwhile.
        run_id: of this start.
        workers: who run already.
    """

    door: socket.socket
    signals: SignalListener
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    workers: list[WorkerProcess] = field(default_factory=list)

    def start(self, cluster: LaunchCluster, command: Command) -> None:
        """Start all workers."""
        master = (LOOPBACK, str(self.door.getsockname()[1]))
        for rank in range(cluster.workers):
            coordinates = cluster.coordinates(rank, rank, cluster.workers, master) | environment(self.run_id)
            self.workers.append(spawn(command, rank, coordinates))

    def end(self) -> None:
        """End those that still run, at once."""
        for worker in self.workers:
            if worker.process.poll() is None:
                signal_session(worker, signal.SIGKILL)
                worker.process.wait()


@contextlib.contextmanager
def begun(cluster: LaunchCluster, command: Command) -> Iterator[Begun | None]:
    """The workers of a run on one host, started; None with several hosts, who have to find each other first.

    A signal that comes before somebody else listens is kept for him. No worker outlives the launcher's `with`.
    """
    if cluster.hosts > 1 or cluster.master is not None:
        yield None
        return
    with SignalListener() as heard, socket.create_server((LOOPBACK, 0), backlog=BACKLOG) as door:
        it = Begun(door, heard)
        try:
            it.start(cluster, command)
            yield it
        finally:
            it.end()


def environment(run_id: str) -> dict[str, str]:
    """What torchrun tells its workers besides: the store is the launcher's, and nobody but the launcher restarts."""
    return {
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
