# SPDX-License-Identifier: Apache-2.0
"""Run the workers of this host until all have ended, one has failed, or a signal comes.

torchrun's agent works in a thread of its own. The main thread prints the workers' output and stays free for signals: a
thread that waits for another host inside torch cannot be interrupted by Ctrl-C.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from paceline.cli.console import err
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.messages import Messages
from paceline.cli.launch.prestart import PrestartedWorkers
from paceline.cli.launch.signals import SignalListener
from paceline.cli.launch.spawn import Command, WorkerProcess
from paceline.cli.launch.workers import GRACE_S, LINGER_S, Agent, OtherHostError
from paceline.communication.torch.store import LOOPBACK, open_store

LOOK_EVERY_S = 0.05
SAY_AFTER_S = 3.0
"""A launcher that has waited so long for other hosts prints which ones."""
_HANDLERS: list[Any] = []  # of earlier starts on several hosts: host 0's store has to outlive a restart
OnPoll = Callable[[list[WorkerProcess], bool, dict[int, int]], None]
"""Gets the workers so far, whether they are being stopped, and the exit codes of lost workers by rank."""
STOP_S = LINGER_S + GRACE_S + 1.0  # for a signal to end everything


@dataclass
class Outcome:
    """How the workers ended: successfully, unless `codes`, `stopped_by` or `error` is set."""

    codes: dict[int, int] = field(default_factory=dict)  # rank -> exit code of a worker that failed
    lost: dict[int, int] = field(default_factory=dict)  # the same where the other workers continued
    stopped_by: signal.Signals | None = None
    error: BaseException | None = None  # the hosts did not find each other, or a bug of ours
    workers: list[WorkerProcess] = field(default_factory=list)
    stuck: bool = False  # the thread waits inside torch: exit without it
    messages: Messages = field(default_factory=Messages)  # of the workers


def launch(
    cluster: LaunchCluster, command: Command, on_poll: OnPoll, prestarted: PrestartedWorkers | None = None
) -> Outcome:
    """Start the workers, unless they are `prestarted`, and wait for all of them; calls `on_poll` meanwhile."""
    with SignalListener() as listener:
        listener.received += prestarted.signals.received if prestarted is not None else []
        runner = _Runner(cluster, command, prestarted)
        say_at = time.monotonic() + SAY_AFTER_S

        def poll() -> None:
            nonlocal say_at
            if cluster.master is not None and not runner.workers and time.monotonic() > say_at:
                say_at = float("inf")
                err().print(_waits_for(cluster), markup=False, soft_wrap=True)
            on_poll(runner.workers, bool(listener.received), runner.lost)

        return _run([runner], listener, poll)[0]


def side_by_side(cluster: LaunchCluster, commands: Sequence[Command]) -> list[Outcome]:
    """Several independent runs of one host at once; a signal ends all."""
    with SignalListener() as listener:
        return _run([_Runner(cluster, command) for command in commands], listener, lambda: None)


def _run(runners: list[_Runner], listener: SignalListener, on_poll: Callable[[], None]) -> list[Outcome]:
    _hush_torch()
    for runner in runners:
        runner.start()
    give_up_at = float("inf")
    while (alive := [runner for runner in runners if runner.is_alive()]) and time.monotonic() < give_up_at:
        alive[0].join(LOOK_EVERY_S)
        on_poll()
        if listener.received and give_up_at == float("inf"):
            waits = all(runner.cluster.master is not None and not runner.workers for runner in runners)
            give_up_at = time.monotonic() + (1.0 if waits else STOP_S)
        for runner in alive:
            runner.forward_signals(listener.received)
            if runner.hangs and runner.error is None:
                runner.error, give_up_at = OtherHostError(runner.cluster.silent()), time.monotonic()
    for runner in runners:
        if runner.is_alive() and runner.agent is not None:
            runner.agent.kill()
    return [_outcome(runner, listener) for runner in runners]


def _waits_for(cluster: LaunchCluster) -> str:
    """Which hosts this launcher waits for, and how long."""
    host, port = cluster.master or ("", 0)
    where, until = f"{host}:{port}", f"{cluster.timeout_s:g} s at most (--timeout)"
    if cluster.host_index:
        return f"host {cluster.host_index} waits for host 0 at {where}, {until}; start the same command there"
    others = f"--host-index 1 to {cluster.hosts - 1}" if cluster.hosts > 2 else "--host-index 1"
    return (
        f"host 0 waits at {where} for {cluster.hosts - 1} more of {cluster.hosts} hosts, {until}; start the same "
        f"command on each with {others}"
    )


def _outcome(runner: _Runner, listener: SignalListener) -> Outcome:
    outcome = Outcome(lost=runner.lost, workers=runner.workers, stuck=runner.is_alive() or runner.stuck)
    if listener.received:
        outcome.stopped_by = listener.received[0]
    elif runner.error is not None:
        outcome.error = runner.error
    elif runner.result is not None:
        outcome.codes = {rank: f.exitcode for rank, f in runner.result.failures.items()}
    return outcome


class _Runner(threading.Thread):
    """Runs torchrun's agent in a thread."""

    def __init__(self, cluster: LaunchCluster, command: Command, prestarted: PrestartedWorkers | None = None) -> None:
        super().__init__(name="paceline-agent", daemon=True)
        self.cluster, self.command, self.prestarted = cluster, command, prestarted
        self.agent: Agent | None = None
        self.result: RunResult | None = None
        self.error: BaseException | None = None
        self.stopping = threading.Event()
        self._moved_at = time.monotonic()
        self.stuck = False  # another thread waits inside torch

    @property
    def hangs(self) -> bool:
        """Whether a call of torchrun's own at the store, which may have no deadline, takes too long."""
        moved_at = self._moved_at if self.agent is None else self.agent.moved_at
        return self.cluster.master is not None and time.monotonic() - moved_at > 2 * self.cluster.timeout_s + STOP_S

    @property
    def workers(self) -> list[WorkerProcess]:
        """The workers that were started so far."""
        if self.agent is None:
            return [] if self.prestarted is None else list(self.prestarted.workers)
        return list(self.agent.workers)

    @property
    def lost(self) -> dict[int, int]:
        """Exit codes of lost workers, by rank; the run continues without them."""
        return {} if self.agent is None else dict(self.agent.lost)

    def run(self) -> None:
        try:
            _await_master(self.cluster, self.stopping)
            self._moved_at = time.monotonic()
            spec = _spec(self.cluster, self.prestarted)
            if self.cluster.master is not None:
                _reuse_store(spec.rdzv_handler, self.command.start)
            self.agent = Agent(spec, self.command, self.cluster, self.prestarted.workers if self.prestarted else ())
            try:
                self.result = self.agent.run()
            finally:
                self.stuck = not self.agent.close()
                spec.rdzv_handler.shutdown()
        except SignalException:
            pass  # from the main thread
        except BaseException as error:  # the main thread prints it
            self.error = error

    def forward_signals(self, received: list[signal.Signals]) -> None:
        """Pass the main thread's signals on; a second one ends the grace period."""
        if not received:
            return
        self.stopping.set()
        if self.agent is not None:
            self.agent.stop_signal = received[0]
            self.agent.skip_grace = len(received) > 1


def _await_master(cluster: LaunchCluster, stopping: threading.Event) -> None:
    """Wait until host 0 listens. torch would wait as well, but without Ctrl-C and with pages of log."""
    if cluster.master is None or cluster.host_index == 0:
        return
    deadline = time.monotonic() + cluster.timeout_s
    while not stopping.is_set():
        try:
            socket.create_connection(cluster.master, timeout=2.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"host 0 does not answer: {error}") from error
        stopping.wait(0.2)
    raise SignalException("stopped while waiting for host 0", signal.SIGTERM)


def _spec(cluster: LaunchCluster, prestarted: PrestartedWorkers | None) -> WorkerSpec:
    """torchrun's description of the run; ranks follow the host index."""
    return WorkerSpec(
        role="worker",
        local_world_size=cluster.workers,
        rdzv_handler=rendezvous_of(cluster, prestarted),
        entrypoint="worker",
        max_restarts=0,
        monitor_interval=0.1,
        master_addr=None if cluster.master is None else cluster.master[0],  # one host: where its store listens
        master_port=None if cluster.master is None else cluster.master[1],
    )


def _reuse_store(handler: Any, start: int) -> None:
    """Use one store for all starts of several hosts, under another run id each time."""
    handler.run_id = f"{handler.run_id}.{start}"
    if _HANDLERS:
        handler._store = _HANDLERS[-1]._store
    _HANDLERS.append(handler)


def _hush_torch() -> None:
    """Mute the agent's log; `failure.py` reports failures."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


class LauncherRendezvous(StaticTCPRendezvous):
    """torchrun's rendezvous of a fixed number of hosts, with host 0's store at a socket of ours."""

    listener: socket.socket | None = None  # of a store that prestarted workers already connect to

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store on host 0, and wait for all launchers."""
        if self._store is None and self.listener is not None:
            file = self.listener.detach()
            self._store = TCPStore(
                self.master_addr, self.master_port, 1, True, self.timeout, wait_for_workers=False, master_listen_fd=file
            )
        elif self._store is None and self.rank == 0:
            self._store = open_store(self.master_addr, self.master_port, self.timeout, self.world_size, wait=True)
            self.master_port = self._store.port
        return super().next_rendezvous()


def rendezvous_of(cluster: LaunchCluster, prestarted: PrestartedWorkers | None = None) -> LauncherRendezvous:
    """On one host at a free port, on several at `--master`."""
    if prestarted is not None:
        port = prestarted.listener.getsockname()[1]
        handler = LauncherRendezvous(LOOPBACK, port, 0, 1, prestarted.run_id, int(cluster.timeout_s))
        handler.listener = prestarted.listener
        return handler
    if cluster.master is None:
        return LauncherRendezvous(LOOPBACK, 0, 0, 1, uuid.uuid4().hex, int(cluster.timeout_s))
    address, port = cluster.master
    return LauncherRendezvous(address, port, cluster.host_index, cluster.hosts, "paceline", int(cluster.timeout_s))
