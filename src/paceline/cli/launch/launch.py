# SPDX-License-Identifier: Apache-2.0
"""Runs the workers of this host to their end, whatever that end is.

torchrun's agent works in a thread of its own. The main thread shows what the workers print and
stays free for signals: a thread that waits for another host inside torch would not hear Ctrl-C.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from paceline.cli.console import err
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.prestart import Begun
from paceline.cli.launch.rendezvous import meeting
from paceline.cli.launch.signals import SignalListener
from paceline.cli.launch.spawn import Command, WorkerProcess
from paceline.cli.launch.workers import GRACE_S, LINGER_S, Agent

LOOK_EVERY_S = 0.05
SAY_AFTER_S = 3.0
"""After so long people hear whom the launcher waits for."""
_KEPT: list[Any] = []  # meetings of several hosts at earlier starts: the store of host 0 must not vanish in between
Look = Callable[
    [list[WorkerProcess], bool, dict[int, int]], None
]  # the workers so far, whether they are being stopped, lost
STOP_S = LINGER_S + GRACE_S + 1.0  # for a signal to end everything


@dataclass
class Outcome:
    """How it ended. Exactly one of the first three says so; none of them: all workers succeeded."""

    codes: dict[int, int] = field(default_factory=dict)  # rank -> return code of those that failed
    lost: dict[int, int] = field(default_factory=dict)  # the same of those without whom the others went on
    stopped_by: signal.Signals | None = None
    error: BaseException | None = None  # the hosts did not find each other, or a bug of ours
    workers: list[WorkerProcess] = field(default_factory=list)
    stuck: bool = False  # torch did not give its thread back: leave without waiting for it


def launch(cluster: LaunchCluster, command: Command, look: Look, begun: Begun | None = None) -> Outcome:
    """Start the workers, unless they were `begun` already, and wait for all of them, calling `look` all the while."""
    _hush_torch()
    with SignalListener() as listener:
        listener.heard += begun.signals.heard if begun is not None else []
        runner = _Runner(cluster, command, begun)
        runner.start()
        give_up_at, say_at = float("inf"), time.monotonic() + SAY_AFTER_S
        while runner.is_alive() and time.monotonic() < give_up_at:
            runner.join(LOOK_EVERY_S)
            if cluster.master is not None and not runner.workers and time.monotonic() > say_at:
                say_at = float("inf")
                err().print(_waits_for(cluster), markup=False, soft_wrap=True)
            look(runner.workers, bool(listener.heard), runner.lost)
            if listener.heard and give_up_at == float("inf"):
                give_up_at = time.monotonic() + (STOP_S if runner.workers else 1.0)
            runner.heed(listener.heard)
        if runner.is_alive() and runner.agent is not None:
            runner.agent.kill()
        return _outcome(runner, listener)


def _waits_for(cluster: LaunchCluster) -> str:
    """Whom this launcher waits for, and how long."""
    host, port = cluster.master or ("", 0)
    where, until = f"{host}:{port}", f"{cluster.timeout_s:g} s at most (--timeout)"
    if cluster.host_index:
        return f"host {cluster.host_index} waits for host 0 at {where}, {until}; start the same command there"
    others = f"--host-index 1 to {cluster.hosts - 1}" if cluster.hosts > 2 else "--host-index 1"
    return (
        f"host 0 waits at {where} for {cluster.hosts - 1} more of {cluster.hosts} hosts, {until}; start the same "
        f"command on each with {others}"
    )


def side_by_side(cluster: LaunchCluster, commands: Sequence[Command], look: Callable[[], None]) -> list[Outcome]:
    """Several runs of one host at once, none of which minds another's end; a signal ends all."""
    _hush_torch()
    with SignalListener() as listener:
        runners = [_Runner(cluster, command) for command in commands]
        for runner in runners:
            runner.start()
        give_up_at = float("inf")
        while (alive := [runner for runner in runners if runner.is_alive()]) and time.monotonic() < give_up_at:
            alive[0].join(LOOK_EVERY_S)
            look()
            if listener.heard and give_up_at == float("inf"):
                give_up_at = time.monotonic() + STOP_S
            for runner in alive:
                runner.heed(listener.heard)
        for runner in runners:
            if runner.is_alive() and runner.agent is not None:
                runner.agent.kill()
        return [_outcome(runner, listener) for runner in runners]


def _outcome(runner: _Runner, listener: SignalListener) -> Outcome:
    outcome = Outcome(lost=runner.lost, workers=runner.workers, stuck=runner.is_alive())
    if listener.heard:
        outcome.stopped_by = listener.heard[0]
    elif runner.error is not None:
        outcome.error = runner.error
    elif runner.result is not None:
        outcome.codes = {rank: f.exitcode for rank, f in runner.result.failures.items()}
    return outcome


class _Runner(threading.Thread):
    """torchrun's agent in a thread."""

    def __init__(self, cluster: LaunchCluster, command: Command, begun: Begun | None = None) -> None:
        super().__init__(name="paceline-agent", daemon=True)
        self.cluster, self.command, self.begun = cluster, command, begun
        self.agent: Agent | None = None
        self.result: RunResult | None = None
        self.error: BaseException | None = None
        self.stopping = threading.Event()

    @property
    def workers(self) -> list[WorkerProcess]:
        """The workers that have been started so far."""
        if self.agent is None:
            return [] if self.begun is None else list(self.begun.workers)
        return list(self.agent.workers)

    @property
    def lost(self) -> dict[int, int]:
        """Return codes of the workers without whom the others go on."""
        return {} if self.agent is None else dict(self.agent.lost)

    def run(self) -> None:
        try:
            _await_master(self.cluster, self.stopping)
            spec = _spec(self.cluster, self.begun)
            if self.cluster.master is not None:
                _meet_again(spec.rdzv_handler, self.command.start)
            self.agent = Agent(spec, self.command, self.cluster, self.begun.workers if self.begun else ())
            try:
                self.result = self.agent.run()
            finally:
                spec.rdzv_handler.shutdown()
        except SignalException:
            pass  # the main thread asked for it
        except BaseException as error:  # shown by the main thread, which has the terminal
            self.error = error

    def heed(self, heard: list[signal.Signals]) -> None:
        """Pass on what the main thread heard; a second signal ends the grace."""
        if not heard:
            return
        self.stopping.set()
        if self.agent is not None:
            self.agent.stop_signal = heard[0]
            self.agent.impatient = len(heard) > 1


def _await_master(cluster: LaunchCluster, stopping: threading.Event) -> None:
    """Wait until host 0 listens. torch would wait too, but deaf to Ctrl-C and with pages of log."""
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


def _spec(cluster: LaunchCluster, begun: Begun | None) -> WorkerSpec:
    """torchrun's description of the run; ranks follow the host index."""
    return WorkerSpec(
        role="worker",
        local_world_size=cluster.workers,
        rdzv_handler=meeting(cluster, begun),
        entrypoint="worker",
        max_restarts=0,
        monitor_interval=0.1,
        master_addr=None if cluster.master is None else cluster.master[0],  # one host: where its store listens
        master_port=None if cluster.master is None else cluster.master[1],
    )


def _meet_again(handler: Any, start: int) -> None:
    """Several hosts meet in one store at all their starts, each time under a name of its own."""
    handler.run_id = f"{handler.run_id}.{start}"
    if _KEPT:
        handler._store = _KEPT[-1]._store
    _KEPT.append(handler)


def _hush_torch() -> None:
    """What the agent logs about a failure, `failure.py` says better."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
