# SPDX-License-Identifier: Apache-2.0
"""Real processes: one is killed, one is stopped, and the last one goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import EXPELLED
from paceline.flow.control.messages import Terms
from tests.flow.control.cluster import SOON, control
from tests.paths import python_path

ROOT = Path(__file__).parents[3]


@pytest.fixture
def started(real_processes: None) -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for one in found:
        one.kill()
        one.wait()
        assert one.stdout is not None
        one.stdout.close()


def start(port: int, places: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.flow.control.program", str(port), str(places), *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": python_path(ROOT)}
    )


def line(one: subprocess.Popen[str]) -> str:
    assert one.stdout is not None
    return one.stdout.readline()


@pytest.mark.slow  # tests/flow does it with a model
def test_killed_and_stopped_processes_are_lost_and_the_last_goes_on(started: list[subprocess.Popen[str]]) -> None:
    places = 200_000
    with control(Terms(1, timeout_s=5.0, start_s=SOON, expected=3)) as (server, log):
        started += [start(server.port, places) for _ in range(3)]
        for one in started:
            assert line(one) == "commit\n"
        pids = {each["doing"]: each["worker"] for each in server.status()["members"]}
        killed, stopped, last = started
        killed.kill()
        lost = log.wait("lost")
        assert "connection closed" in lost["why"] and lost["worker"] == pids.get(str(killed.pid), lost["worker"])
        stopped.send_signal(signal.SIGSTOP)
        log.wait("generation", number=3)
        assert "silent" in log.of("lost")[1]["why"]
        stopped.send_signal(signal.SIGCONT)
        assert stopped.stdout is not None
        assert "silent" in next(text for text in stopped.stdout if "given_up" in text)
        assert stopped.wait(SOON) == EXPELLED
        assert line(last) == "commit\n"
        status = server.status()
        assert status["generation"] == 3 and len(status["members"]) == 1


@pytest.mark.slow
def test_a_child_of_a_worker_does_not_keep_its_connection(started: list[subprocess.Popen[str]]) -> None:
    """As the workers of a DataLoader would, which outlive a killed parent for a while."""
    with control(Terms(timeout_s=600.0)) as (server, log):
        started.append(start(server.port, 1, "fork"))
        child = int(line(started[0]))
        try:
            started[0].kill()
            assert "connection closed" in log.wait("lost", worker=0)["why"]
        finally:
            os.kill(child, signal.SIGKILL)
