# SPDX-License-Identifier: Apache-2.0
"""Workers under a keeper: how they ended is known, also to a launcher that did not start them; who dies is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline_plugins.sites import exit_watcher, supervisor
from paceline_plugins.sites.process import UNKNOWN, Identity, OutputFiles, Process
from paceline_plugins.sites.supervisor import MAX_DEATHS, PAUSES_S, Supervisor, WorkerCommand
from tests.cli.test_run import assert_gone
from tests.waiting import alive, until

Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers that do not outlive the test."""
    started: list[Process] = []

    def one(code: str, place: int = 0) -> Process:
        command = [sys.executable, "-S", "-c", code]
        started.append(Process.start(command, os.environ, OutputFiles.of(tmp_path, place, 1)))
        return started[-1]

    yield one
    for process in started:
        process.signal(signal.SIGKILL)


def ended(process: Process) -> int | None:
    until(lambda: process.poll() is not None)
    return process.poll()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "wanted"), [("print('hello')", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_the_code_is_the_workers(start: Start, code: str, wanted: int) -> None:
    assert ended(start(code)) == wanted


ASKS_FOR_TIME = """
import os, signal, subprocess, sys
child = subprocess.Popen(["sleep", "300"])
def end(*_):
    raise SystemExit(5)
signal.signal(signal.SIGTERM, end)
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.processes
def test_a_request_to_end_is_heard_by_the_worker_and_its_answer_is_known(start: Start) -> None:
    """And what the worker had started ends with it."""
    process = start(ASKS_FOR_TIME)
    until(lambda: process.files.stdout.read_text().endswith("\n"))
    child = int(process.files.stdout.read_text())
    process.signal(signal.SIGTERM)
    assert ended(process) == 5
    assert_gone([child])


LAUNCHER = """
import os, sys
from pathlib import Path
from paceline_plugins.sites.process import OutputFiles as Files, Process
process = Process.start([sys.executable, "-S", "-c", sys.argv[2]], os.environ, Files.of(Path(sys.argv[1]), 0, 1))
print(process.identity.pid, process.identity.began, flush=True)
os.kill(os.getpid(), 9)
"""


def orphan(directory: Path, code: str) -> tuple[OutputFiles, Identity]:
    """A worker whose launcher was killed."""
    said = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(directory), code],
        stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(exit_watcher.__file__).parents[2])},
    )  # fmt: skip
    assert said.returncode == -9
    pid, began = map(int, said.stdout.split())
    return OutputFiles.of(directory, 0, 1), Identity(pid, began)


@pytest.mark.processes
def test_a_worker_survives_its_launcher_and_the_next_one_learns_its_code(tmp_path: Path) -> None:
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nraise SystemExit(6)"
    files, identity = orphan(tmp_path, f"import os; os.chdir({str(tmp_path)!r})\n{wait}")
    taken = Process.find(files, identity)
    assert taken is not None and taken.adopted and taken.poll() is None
    until(lambda: taken.pid)
    (tmp_path / "go").touch()
    assert ended(taken) == 6
    again = Process.find(files, identity)  # a launcher that comes when all is over
    assert again is not None and again.poll() == 6


@pytest.mark.processes
def test_a_worker_is_found_that_nobody_had_written_down(tmp_path: Path) -> None:
    files, identity = orphan(tmp_path, "import time; time.sleep(300)")
    until(files.status.exists)
    taken = Process.find(files, None)
    assert taken is not None and taken.identity == identity
    taken.signal(signal.SIGKILL)
    assert ended(taken) == UNKNOWN
    assert Process.find(OutputFiles.of(tmp_path, 1, 1), None) is None


@pytest.mark.processes
def test_without_its_keeper_a_worker_is_ended(tmp_path: Path) -> None:
    files, identity = orphan(tmp_path, "import time; time.sleep(300)")
    taken = Process.find(files, identity)
    assert taken is not None
    until(lambda: taken.pid)
    pid = taken.pid
    assert pid is not None and alive(pid)
    os.kill(identity.pid, signal.SIGKILL)
    assert ended(taken) == UNKNOWN
    assert_gone([pid])


class FakeProcess:
    """Ends when it is told to."""

    def __init__(self, files: OutputFiles) -> None:
        self.files, self.code = files, None
        self.identity = Identity(1, 1)

    def poll(self) -> int | None:
        return self.code


class Shop:
    """A supervisor with a clock of our own and workers that do nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, places: int) -> None:
        self.now, self.started, self.news = 0.0, [], []

        def begin(command: object, environment: dict[str, str], files: OutputFiles, folder: str) -> FakeProcess:
            self.started.append((environment["LOCAL_RANK"], files.stdout.name))
            return FakeProcess(files)

        monkeypatch.setattr(supervisor.Process, "start", begin)
        self.workers = Supervisor(
            WorkerCommand(["x"], {}, tmp_path),
            places,
            lambda kind, facts: self.news.append((kind, facts)),
            clock=lambda: self.now,
        )

    def end(self, place: int, code: int) -> None:
        self.workers.places[place].process.code = code  # type: ignore[union-attr]
        self.workers.look()


def test_who_dies_is_replaced_at_once_and_then_after_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shop = Shop(monkeypatch, tmp_path, 2)
    shop.workers.look()
    assert shop.started == [("0", "place-000.out"), ("1", "place-001.out")]
    for turn, pause in enumerate(PAUSES_S[1:], start=2):
        shop.end(1, 1)
        assert len(shop.started) == turn + (pause == 0)
        shop.now += pause
        shop.workers.look()
        assert shop.started[-1] == ("1", f"place-001.{turn}.out")
    shop.end(1, -9)
    assert [place.given_up for place in shop.workers.places] == [False, True]
    shop.now += 1000.0
    shop.workers.look()
    assert len(shop.started) == 1 + MAX_DEATHS and not shop.workers.waiting
    assert [death.code for death in shop.workers.deaths] == [1, 1, 1, 1, -9]
    assert shop.news[-1] == ("ended", {"place": 1, "turn": MAX_DEATHS, "code": -9, "given_up": True})


@pytest.mark.parametrize("apart_s", [1.0, 12.0, 100.0, 4000.0])
def test_however_long_a_program_takes_to_start_its_deaths_are_bounded(
    apart_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shop = Shop(monkeypatch, tmp_path, 1)
    shop.workers.look()
    for _ in range(MAX_DEATHS):
        shop.now += apart_s
        shop.end(0, -9)
        shop.now += max(PAUSES_S)
        shop.workers.look()
    assert len(shop.started) == MAX_DEATHS and shop.workers.places[0].given_up and not shop.workers.waiting


def test_the_next_launcher_knows_where_the_last_one_stood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shop = Shop(monkeypatch, tmp_path, 4)
    shop.workers.look()
    shop.end(1, 1)
    monkeypatch.setattr(supervisor.Process, "find", lambda files, identity: FakeProcess(files) if identity else None)
    state = shop.workers.state()
    state[2] |= {"process": None}  # the last one died while it started this one
    state[3] |= {"process": None, "given_up": True}
    after = Supervisor(shop.workers.command, 1)
    assert after.take_over(state) == 2
    assert [(place, turn) for place, turn, _ in after.running] == [(0, 1), (1, 2)]
    assert [place.due_at for place in after.places] == [None, None, 0.0, 0.0]
    state[0] |= {"ended_well": True, "process": None}
    assert after.take_over(state) == 1 and after.over


@pytest.mark.processes
def test_a_pid_that_was_used_again_is_not_touched(tmp_path: Path) -> None:
    """The record names a pid and a beginning; another process has the pid now."""
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as stranger:
        try:
            stale = Identity(stranger.pid, exit_watcher.began(stranger.pid) - 1)
            assert not stale.lives and Identity(stranger.pid, stale.began + 1).lives
            taken = Process.find(OutputFiles.of(tmp_path, 0, 1), stale)
            assert taken is not None and taken.poll() == UNKNOWN
            taken.signal(signal.SIGKILL)
            assert alive(stranger.pid)
        finally:
            stranger.kill()
