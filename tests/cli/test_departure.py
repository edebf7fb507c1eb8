# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""Hosts that are taken or asleep: their workers leave an elastic run in order, or join it again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import LEFT
from paceline_plugins.sites.supervisor import Departure, Supervisor, WorkerCommand
from tests.cli.test_elastic import events, until
from tests.cli.test_run import Script, _here, script, started  # noqa: F401
from tests.flow.test_leaving import in_model, trained
from tests.paths import ROOT
from tests.ports import free_port

DEADLINE_S = 40.0
processes = pytest.mark.processes


@pytest.fixture
def program(tmp_path: Path, script: Script) -> Callable[..., SimpleNamespace]:
    """A program that writes down what it trained on."""

    def write(**phase: Any) -> SimpleNamespace:
        books = tmp_path / "books"
        books.mkdir()
        place = tmp_path / "phase.json"
        place.write_text(
            json.dumps({"books": str(books), "pause": 0.01, "samples": 2000, "epochs": 1, "hold": 10, **phase})
        )
        path = script(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
            f"from tests.flow.program import main\nmain(Path({str(place)!r}))\n"
        )
        return SimpleNamespace(path=path, books=books, samples=phase.get("samples", 2000))

    return write


@contextlib.contextmanager
def two_hosts(path: Path, timeout: int = 60) -> Iterator[tuple[Any, Any]]:
    """A launcher that leads, and one that joins it, each with a worker."""
    address = f"127.0.0.1:{free_port()}"
    lead = ("--elastic", "1:4", "--listen", address, "--timeout", timeout, "--log", "lead", path)
    joins = ("--join", address, "--job", "lead/certificates/job.pem", "--timeout", timeout, "--log", "join", path)
    with started(*lead) as first:
        until(lambda: events(Path("lead"), "holds"))
        with started(*joins) as second:
            until(lambda: len(events(Path("lead"), "joined")) == 2)
            Path("books/go").touch()
            until(lambda: len(events(Path("lead"), "holds")) == 2)
            yield first, second


def commits(log: str) -> int:
    return sum(one.read_text().count('"kind": "exchange"') for one in Path(log).glob("rank-*.jsonl"))


def more_exchanges(count: int = 3) -> None:
    there = commits("lead")
    until(lambda: commits("lead") >= there + count)


@processes
def test_a_launcher_that_gets_sigterm_leaves_and_the_others_go_on(program: Any) -> None:
    one = program()
    with two_hosts(one.path) as (first, second):
        more_exchanges()
        second.send_signal(signal.SIGTERM)
        _, said = second.communicate(timeout=DEADLINE_S)
        assert second.returncode == LEFT, said
        assert "have left the run in order: its launcher got SIGTERM" in said and "worker has left in order" in said
        _, led = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 0 and "has left in order; what it trained is in the model" in led
    assert trained(one) == in_model(one) == {1: one.samples}


@pytest.mark.slow  # test_elastic.py kills such a launcher
@processes
@pytest.mark.full
def test_a_host_that_has_the_control_plane_goes_on_later(program: Any, tmp_path: Path) -> None:
    """All of its workers leave, the last after it has written a step; `--again` goes on from there."""
    one = program(checkpoint=str(tmp_path / "steps"), hold=0)
    with started("--elastic", "1:2", "--workers", 2, "--timeout", 60, "--log", "lead", one.path) as first:
        until(lambda: commits("lead") >= 4)
        first.send_signal(signal.SIGTERM)
        _, said = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == LEFT, said
    with started("--again", "lead") as again:
        _, said = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0, said
    assert trained(one) == in_model(one) == {1: one.samples}


LEAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
open(sys.argv[1], "a").write("began\\n")
time.sleep(600)
"""


@processes
def test_workers_leave_and_no_others_are_started(tmp_path: Path) -> None:
    began, said = tmp_path / "began", []
    command = WorkerCommand([sys.executable, "-c", LEAVES.format(code=LEFT), str(began)], dict(os.environ), tmp_path)
    workers = Supervisor(command, 2)
    departure = Departure(workers, lambda kind, facts: said.append(kind), 60.0)
    received: list[signal.Signals] = []

    def look() -> bool:
        ends = departure.ends_launcher(received)
        departure.look()
        workers.look()
        return ends

    def count() -> int:
        look()
        return len(began.read_text().split()) if began.exists() else 0

    try:
        until(lambda: count() == 2)
        assert departure.left == "" and not said
        received.append(signal.SIGTERM)
        assert not departure.ends_launcher(received)
        until(look)
        assert departure.left == "its launcher got SIGTERM" and said == ["leaving"]
        assert not workers.deaths and not workers.waiting and count() == 2
        assert all(row["due"] for row in workers.state())  # another launcher would start them
    finally:
        workers.stop(signal.SIGKILL)


@pytest.mark.slow  # the storms stop workers
@processes
@pytest.mark.full
def test_a_host_that_sleeps_joins_again_when_it_wakes(program: Any) -> None:
    """All of its processes stop for longer than the others wait; its worker is lost, ends with 75, and is replaced."""
    one = program(samples=3000)
    with two_hosts(one.path, timeout=10) as (first, second):
        more_exchanges()
        worker = json.loads(Path("join/output/place-000.json").read_text())
        pids = [second.pid, worker["keeper"], worker["pid"]]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: events(Path("lead"), "lost"))
        more_exchanges()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        _, said = second.communicate(timeout=DEADLINE_S)
        first.communicate(timeout=DEADLINE_S)
    assert (first.returncode, second.returncode) == (0, 0), said
    assert "this worker is lost: declared lost by the control plane; a new one replaces it" in said
    assert len(events(Path("lead"), "joined")) == 3
    assert in_model(one) == {1: one.samples}
