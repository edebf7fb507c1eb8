# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""Hosts that are taken, borrowed or asleep: their workers leave an elastic run in order, and come back."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.launch.supervisor import Supervisor, WorkerCommand
from paceline.cli.run.absence import idle, notice
from paceline.cli.run.absence.departure import Departure
from paceline.cli.run.absence.options import next_time
from paceline.cli.run.elastic_messages import of_process
from paceline.errors import LEFT
from tests.cli.test_elastic import events, until
from tests.cli.test_run import Script, _here, run, script, started  # noqa: F401
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
def two_hosts(path: Path, *join: object, timeout: int = 60) -> Iterator[tuple[Any, Any]]:
    """A launcher that leads, and one that joins it, each with a worker."""
    address = f"127.0.0.1:{free_port()}"
    lead = ("--elastic", "1:4", "--listen", address, "--timeout", timeout, "--log", "lead", path)
    joins = ("--join", address, "--job", "lead/door/job.pem", "--timeout", timeout, "--log", "join", *join, path)
    with started(*lead) as first:
        until(lambda: events(Path("lead"), "holds"))
        with started(*joins) as second:
            until(lambda: len(events(Path("lead"), "joined")) == 2)
            Path("books/go").touch()
            until(lambda: len(events(Path("lead"), "holds")) == 2)
            yield first, second


def commits(log: str) -> int:
    return len(events(Path(log), "exchange"))


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


@processes
@pytest.mark.full
def test_a_file_is_a_notice(program: Any, tmp_path: Path) -> None:
    one = program()
    with two_hosts(one.path, "--notice", "taken") as (first, second):
        more_exchanges()
        Path("taken").touch()
        _, said = second.communicate(timeout=DEADLINE_S)
        assert second.returncode == LEFT and "leave in order, within 15 s: a notice lies at taken" in said, said
        first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 0
    assert trained(one) == in_model(one) == {1: one.samples}


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


# -- the reasons --------------------------------------------------------------------------------------


@pytest.fixture
def web() -> Iterator[SimpleNamespace]:
    """A server of this host whose answers are `answers`: path -> status and body, or what gives them."""
    answers: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path, (404, ""))
            status, body = found(self) if callable(found) else found
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_PUT = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield SimpleNamespace(answers=answers, url=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (404, "no", False),
        (204, "", False),
        (200, "FALSE", False),
        (200, "NONE", False),
        (200, "TRUE", True),
        (200, '{"action": "terminate", "time": "2026-11-26T08:00:00Z"}', True),
        (200, '{"DocumentIncarnation": 1, "Events": []}', False),
        (200, '{"DocumentIncarnation": 2, "Events": [{"EventType": "Freeze"}]}', False),
        (200, '{"DocumentIncarnation": 2, "Events": [{"EventType": "Preempt"}]}', True),
    ],
)
def test_what_clouds_answer(web: SimpleNamespace, status: int, body: str, found: bool) -> None:
    web.answers["/notice"] = status, body
    assert bool(notice.ask(f"{web.url}/notice")) is found


def test_headers_and_tokens(web: SimpleNamespace) -> None:
    """Google and Azure answer only with their header; Amazon wants a token, which it gives for a PUT."""

    def amazon(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        return (200, "taken") if request.headers["X-aws-ec2-metadata-token"] == "secret" else (401, "")

    def other(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        return (200, "TRUE") if request.headers["Metadata-Flavor"] and request.headers["Metadata"] else (403, "")

    web.answers |= {
        "/a": amazon,
        "/latest/api/token": lambda request: (200 if request.command == "PUT" else 405, "secret"),
    }
    web.answers["/g"] = other
    assert notice.ask(f"{web.url}/a").endswith("says taken") and notice.ask(f"{web.url}/g")


def test_a_url_is_polled(web: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fail for a while; that is said once."""
    monkeypatch.setattr(notice, "POLL_S", 0.01)
    said: list[str] = []
    polled = notice.Notice(f"{web.url}/notice", said.append)
    polled.start()
    assert polled.why() == ""
    web.answers["/notice"] = 500, "broken"
    until(lambda: said)
    web.answers["/notice"] = 200, "taken"
    until(polled.why)
    polled.close()
    assert len(said) == 1 and "does not answer any more" in said[0]


def test_what_is_refused(script: Script) -> None:
    path = script("")
    fixed = run("--workers", 2, "--while-idle", path)
    assert fixed.exit_code == 2 and "--while-idle is for elastic runs" in fixed.stderr
    time_of_day = run("--elastic", "1:2", "--until", "8 o'clock", path)
    assert time_of_day.exit_code == 2 and "--until must be a time of day such as 08:00" in time_of_day.stderr
    dead = run("--elastic", "1:2", "--notice", f"http://127.0.0.1:{free_port()}/notice", path)
    assert dead.exit_code == 2 and "cannot be asked" in dead.stderr and "Connection refused" in dead.stderr


def test_until_is_today_or_tomorrow() -> None:
    now = datetime.datetime(2026, 11, 30, 22, 15)
    assert next_time("22:16", now) == datetime.datetime(2026, 11, 30, 22, 16)
    assert next_time("22:15", now) == datetime.datetime(2026, 12, 1, 22, 15)
    assert next_time("08:00", now) == datetime.datetime(2026, 12, 1, 8, 0)


class Desk:
    """A host with a clock, terminals and processors."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.used = root, 1000.0, False
        self.busy_s = self.own_s = 0.0
        (root / "dev/pts").mkdir(parents=True)
        (root / "dev/pts/0").touch()
        self.types(0.0)
        for pid in (os.getpid(), 77, 78):
            (root / f"proc/{pid}").mkdir(parents=True)
        self.host = idle.IdleHost(lambda: [77], lambda: self.used, root, lambda: self.now)

    def types(self, when: float) -> None:
        os.utime(self.root / "dev/pts/0", (when, when))

    def after(self, seconds: float, others: float = 0.0, own: float = 0.0) -> str:
        """Who uses it, so many seconds later, in which others and this run used so many processors."""
        steps = int(seconds / idle.LOOK_S)
        for _ in range(steps):
            self.now += idle.LOOK_S
            self.own_s += idle.LOOK_S * own
            self.busy_s += idle.LOOK_S * (own + others)
            ticks = os.sysconf("SC_CLK_TCK")
            zeros = "S 1 1 {} " + "0 " * 7 + "{} 0 0 0 0"
            (self.root / "proc/stat").write_text(f"cpu  {int(self.busy_s * ticks)} 0 0 9 9 0 0 0 0 0\ncpu0 1\n")
            (self.root / f"proc/{os.getpid()}/stat").write_text("1 (a) b) " + zeros.format(5, 0))
            (self.root / "proc/77/stat").write_text("77 (keeper) " + zeros.format(77, 0))
            (self.root / "proc/78/stat").write_text("78 (python) " + zeros.format(77, int(self.own_s * ticks)))
            found = self.host.why()
        return found


def test_a_host_is_idle_when_nobody_types_and_others_compute_little(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert "is measured" in desk.after(10)
    assert desk.after(40) == ""
    assert desk.after(60, own=2.0) == ""  # this run's own work does not count
    assert desk.after(60, own=2.0, others=0.4) == ""  # nor a little of others, once it has begun
    assert desk.after(60, own=2.0, others=1.0) == "others use 1.0 processors"
    assert desk.after(60, others=0.4) == "others use 0.4 processors"  # more than with what it begins
    assert desk.after(60) == ""
    desk.types(desk.now + 1)
    assert desk.after(2) == "somebody typed at a terminal 1 s ago"
    assert desk.after(idle.QUIET_S - 10).startswith("somebody typed")
    assert desk.after(20) == ""
    desk.used = True
    assert desk.after(2) == "its desktop is in use"


LEAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
open(sys.argv[1], "a").write("began\\n")
time.sleep(600)
"""


@processes
def test_workers_leave_and_come_back_with_the_hosts_user(tmp_path: Path) -> None:
    began, said = tmp_path / "began", []
    command = WorkerCommand([sys.executable, "-c", LEAVES.format(code=LEFT), str(began)], dict(os.environ), tmp_path)
    workers = Supervisor(command, 2)
    departure = Departure(workers, lambda kind, facts: said.append(kind), 60.0)
    user = SimpleNamespace(why=lambda: "")
    departure.absence.idle = user

    def look() -> None:
        departure.look()
        workers.look()

    def count() -> int:
        look()
        return len(began.read_text().split()) if began.exists() else 0

    try:
        until(lambda: count() == 2)
        user.why = lambda: "somebody typed"
        until(lambda: look() or not workers.running)  # type: ignore[func-returns-value]
        assert said == ["leaving"] and not workers.deaths and not workers.waiting and departure.left == ""
        assert all(row["due"] for row in workers.state())  # another launcher would start them
        user.why = lambda: ""
        until(lambda: count() == 4)
        assert said == ["leaving", "returning"]
        assert not departure.ends_launcher([signal.SIGTERM])
        until(lambda: look() or departure.ends_launcher([signal.SIGTERM]))  # type: ignore[func-returns-value]
        assert departure.left == "its launcher got SIGTERM"
    finally:
        workers.stop(signal.SIGKILL)


def test_a_second_signal_and_others_than_sigterm_end_a_launcher(tmp_path: Path) -> None:
    workers = Supervisor(WorkerCommand([], {}, tmp_path), 1)
    workers.places[0].process = SimpleNamespace(poll=lambda: None, ask_to_leave=lambda: True)  # type: ignore[assignment]
    departure = Departure(workers, lambda kind, facts: None, 60.0)
    assert departure.ends_launcher([signal.SIGINT]) and not departure.ends_launcher([signal.SIGTERM])
    assert departure.ends_launcher([signal.SIGTERM, signal.SIGTERM])


def test_a_worker_that_only_died_is_not_said_to_have_left_in_order() -> None:
    gone = {"place": 0, "turn": 1, "left": True, "given_up": False}
    assert of_process("process ended", {**gone, "code": LEFT}, False) == "this worker has left in order"
    assert "what it had not exchanged" in of_process("process ended", {**gone, "code": -signal.SIGTERM}, False)
