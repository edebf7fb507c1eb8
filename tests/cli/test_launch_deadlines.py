# SPDX-License-Identifier: Apache-2.0
"""A launcher ends, whatever does not answer: another host's store, or a worker that hangs in the kernel."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerState

from paceline.cli.launch import workers
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.launch import _spec
from paceline.cli.launch.spawn import Command, WorkerProcess
from paceline.cli.launch.workers import Agent, EndNotes, OtherHostError

SOON_S = 60.0
SECOND = LaunchCluster(1, 2, 1, ("10.0.0.1", 29500), 600.0)


class SilentStore:
    """Beyond a link that was cut: no call returns before the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.over.wait(10 * SOON_S)
        raise RuntimeError("the test is over")


class Stuck:
    """A process that runs on after SIGKILL."""

    pid = 0

    def poll(self) -> None: ...

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("stuck", timeout)


def agent(store: Any, process: Any) -> Agent:
    """That of the second host, whose worker is this process."""
    worker = WorkerProcess(1, process, Path("out"), Path("err"))
    made = Agent(_spec(SECOND, None), Command([], {}, Path()), SECOND, [worker])
    made._store = store
    made._start_workers(made._worker_group)
    return made


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentStore]:
    monkeypatch.setattr(workers, "LINGER_S", 0.0)
    store = SilentStore()
    yield store
    store.over.set()


def test_a_silent_store_holds_up_no_worker_and_is_named_after_the_deadline(silent: SilentStore) -> None:
    one = agent(silent, Stuck())
    assert one._notes is not None
    assert one._monitor_workers(one._worker_group).state is WorkerState.HEALTHY
    one._notes.answered_at -= SECOND.timeout_s
    with pytest.raises(OtherHostError, match=r"host 0 has not answered at 10\.0\.0\.1:29500 for 600 s"):
        one._monitor_workers(one._worker_group)
    one._publish_end("this host is told to leave")
    one._exit_barrier()
    assert not one.close(), "the thread hangs, and the command must exit without it"


@pytest.mark.parametrize(("leaves", "reason"), [(1, "worker 1 failed"), (0, "worker 0 failed"), (1, ""), (0, "")])
def test_hosts_read_why_another_one_has_left(leaves: int, reason: str) -> None:
    """Host 0, which has the store, ends last."""
    store = dist.HashStore()
    hosts = [EndNotes(store, 1), EndNotes(store, 0)]
    for host in hosts:
        host.start()
    first, last = hosts[leaves], hosts[1 - leaves]
    ending = threading.Thread(target=first.leave, args=(reason, SOON_S))
    ending.start()
    if reason:
        last.join(SOON_S)
    assert last.leave(linger_s=SOON_S)
    ending.join(SOON_S)
    assert not first.is_alive() and last.reason == reason
