# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""`paceline run --elastic`: workers come, die, are replaced and end; launchers die and are followed by others."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from devtools.storm.__main__ import app as storm
from devtools.storm.recorder import TapedControlServer
from devtools.storm.tape import Played, read
from devtools.storm.what_if import replay
from typer.testing import CliRunner, Result

from paceline_plugins.sites import saved_plan
from tests.cli.test_run import Script, _here, assert_gone, run, script, started  # noqa: F401
from tests.ports import free_port
from tests.waiting import until

DEADLINE_S = 150.0

MEMBER = """
    import os, sys, time
    from paceline.flow.control.client import ControlClient
    from paceline.flow.control.messages import About
    from paceline.communication.sockets.tls import TLS
    host, port = os.environ["PACELINE_CONTROL"].rsplit(":", 1)
    about, timeout_s = About("here", "127.0.0.1", 1, {{}}), float(os.environ["PACELINE_TIMEOUT_S"])
    member = ControlClient(host, int(port), about, TLS.folder(os.environ["PACELINE_TLS"]), timeout_s)
    generation = member.enter()
    place, turn = os.environ["LOCAL_RANK"], 1 + os.path.exists("died")
    print("worker", member.worker, "at", place, "RANK" in os.environ, os.getpid())
    while generation.exchange < 6 or not os.path.exists("enough"):
        if member.worker in generation.newcomers:
            member.holds_state(generation.number)
        member.starts(generation.exchange + 1)
        time.sleep(0.01)
        generation = member.commit(generation.number, generation.exchange + 1, [], {{}}).generation
        open(os.environ["PACELINE_EXCHANGED"], "w").close()
        {then}
    member.leave()
    print("finished")
"""
DIES_ONCE = """if place == {place!r} and turn == 1 and generation.exchange >= 3:
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        if turn == 2 and len(generation.members) == {size}:
            open("enough", "w").close()"""


def events(log: Path, kind: str) -> list[dict[str, Any]]:
    """Of the whole lines: the last one may be under way."""
    lines = (log / "control.jsonl").read_text().split("\n")[:-1] if (log / "control.jsonl").exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.claim
@pytest.mark.processes
def test_who_dies_is_replaced_and_the_run_ends_well(script: Script, tmp_path: Path) -> None:
    path = script(MEMBER.format(then=DIES_ONCE.format(place="1", size=2)))
    result = run("--elastic", "1:3", "--workers", 2, "--timeout", 30, "--log", "log", path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum(line.startswith("[1] worker ") and " at 1 False " in line for line in lines) == 2
    assert {"[0] finished", "[1] finished"} <= set(lines)
    assert "[1] this worker is lost: killed by SIGKILL (9); a new one replaces it" in result.stderr
    assert "lost during the run: [1] killed by SIGKILL (9)" in result.stderr and "2 workers finished" in result.stderr
    log = tmp_path / "log"
    assert [event["worker"] for event in events(log, "joined")] == [0, 1, 2]
    assert len(events(log, "lost")) == 1 and len(events(log, "left")) == 2
    assert (
        f"--tls {log / 'certificates' / 'host-0' / 'join'} PROGRAM" in result.stderr
        and not (log / "certificates" / "job.pem").exists()
    )
    assert (log / "output" / "place-001.2.out").read_text().endswith("finished\n")


@pytest.mark.processes
def test_workers_of_another_launcher_join_and_are_replaced_there(script: Script, tmp_path: Path) -> None:
    path = script(MEMBER.format(then=DIES_ONCE.format(place="0", size=1)))
    address = f"127.0.0.1:{free_port()}"
    lead = ("--elastic", "1:2", "--workers", 0, "--listen", address, "--timeout", 30, "--log", "lead")
    with (
        started(*lead) as first,
        started(
            "--join", address, "--job", "lead/certificates/job.pem", "--timeout", 30, "--log", "join", path
        ) as second,
    ):
        _, err_1 = second.communicate(timeout=DEADLINE_S)
        _, err_0 = first.communicate(timeout=DEADLINE_S)
    assert (first.returncode, second.returncode) == (0, 0), (err_0, err_1)
    assert f"paceline run --join {address} --workers N --job FILE" in err_0
    assert "lost during the run: [0] killed by SIGKILL (9)" in err_1 and "1 worker finished" in err_1
    assert len(events(tmp_path / "lead", "lost")) == 1


@pytest.mark.slow  # tests/cli/test_departure.py ends one in order
@pytest.mark.processes
def test_a_launcher_that_was_killed_is_followed_by_another(script: Script, tmp_path: Path) -> None:
    """One of the workers dies in between; the other is never started again."""
    log = tmp_path / "log"
    path = script(MEMBER.format(then=""))
    with started("--elastic", "1:2", "--workers", 2, "--timeout", 60, "--log", log, path) as first:
        until(lambda: len(events(log, "joined")) == 2)
        record = json.loads((log / saved_plan.NAME).read_text())
        assert record["plan"]["control"][1] > 0 and "PACELINE_LOG" in record["plan"]["environment"]
        first.kill()
        first.communicate(timeout=DEADLINE_S)
    status = [json.loads((log / "output" / f"place-00{place}.json").read_text()) for place in (0, 1)]
    os.kill(status[1]["pid"], signal.SIGKILL)
    until(lambda: "code" in json.loads((log / "output" / "place-001.json").read_text()))
    with started("--again", log) as second:
        until(lambda: any(2 in [place[0] for place in one["members"]] for one in events(log, "generation")))
        (tmp_path / "enough").touch()  # not before the new one is a member, which the other may not wait for
        printed, errors = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, errors
    assert "resumed: 1 of 2 workers still run" in errors
    assert "[1] this worker is lost: killed by SIGKILL (9)" in errors and "2 workers finished" in errors
    assert {"[0] finished", "[1] finished"} <= set(printed.splitlines())
    assert json.loads((log / "output" / "place-000.json").read_text()) == {**status[0], "code": 0}
    assert events(log, "back") and len(events(log, "joined")) == 3 and not events(log, "refused")
    assert not (log / "output" / "place-000.2.out").exists()
    assert run("--again", log).exit_code == 0  # it has ended: there is nothing left to do


TRAINS = """
    import os, time, torch, paceline
    from torch.utils.data import DataLoader, TensorDataset
    place, again = os.environ["LOCAL_RANK"], os.path.exists("again")
    if place == "1" and os.path.exists("died"):
        open("again", "w").close()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = paceline.attach(model, optimizer, "bmuf(period=4)")
    made = 0
    for epoch in range(run.epoch, 2):
        for (x,) in run.share(DataLoader(TensorDataset(torch.ones(160, 2)), batch_size=2)):
            made += 1
            if place == "1" and made == 6 and not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), 9)
            while place == "0" and made == 14 and not os.path.exists("again"):
                time.sleep(0.01)
            time.sleep(0.03)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    run.close()
"""


@pytest.mark.slow  # tests/testing plays tapes
@pytest.mark.processes
def test_the_tape_of_a_real_run_is_played_with_the_same_members(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One SIGKILL, and one worker that takes the place; then what-ifs of it."""
    monkeypatch.setattr("paceline.flow.control.server.ControlServer", TapedControlServer)
    log = tmp_path / "log"
    result = run("--elastic", "1:3", "--workers", 2, "--timeout", 60, "--log", log, script(TRAINS))
    assert result.exit_code == 0, result.output
    tape = read(log)
    assert sorted(one.end for one in tape.flights) == ["left", "left", "lost"] and len(tape.generations) == 3
    (lost,) = (one.worker for one in tape.flights if one.end == "lost")
    found = [replay(seed, Played(tape)) for seed in range(3)]
    assert all(one.same and one.outcome.problems == [] and one.lost == one.repeated == 0 for one in found)
    assert sum(size for size, _ in tape.wires) > 0 and sum(time for _, time in tape.wires) > 0
    assert (log / "control.jsonl").stat().st_size < 200 * tape.exchanges + 10_000
    asked = ["--replay-tape", str(log), "--without-death", str(lost), "--seeds", "2", "--jobs", "1"]
    said = CliRunner().invoke(storm, asked)
    assert said.exit_code == 0, said.output
    table = {line[:50].strip(): line[50:].split() for line in said.stdout.splitlines()}
    assert table["workers lost"] == ["1", "1", "0"] and table["members as recorded"] == ["yes", "no"]


ONCE = """
    import os, sys, time
    place = os.environ["LOCAL_RANK"]
    first = not os.path.exists("came-" + place)
    open("came-" + place, "w").close()
    {then}
"""


def plain(script: Script, then: str, *options: object) -> Result:
    """A run of two workers that never speak to the control plane."""
    path = script(ONCE.format(then=then))
    return run("--elastic", "1:2", "--workers", 2, "--timeout", 30, "--log", "log", *options, path)


WAIT_FOR_0 = """
    while place == "1":
        try:
            if '"code"' in open(os.environ["PACELINE_LOG"] + "/output/place-000.json").read():
                {then}
        except OSError:
            pass
"""


@pytest.mark.processes
@pytest.mark.parametrize(("then", "code"), [("raise SystemExit(5)", 5), ("os.kill(os.getpid(), 9)", 3)])
def test_who_fails_when_others_have_ended_is_seen_in_the_code(script: Script, then: str, code: int) -> None:
    result = plain(script, WAIT_FOR_0.strip().format(then=then))
    assert result.exit_code == code, result.output
    assert "the program is over, so it is not replaced" in result.stderr
    assert "failed after other workers had succeeded" in result.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_a_control_plane_that_is_gone_ends_those_who_joined(script: Script) -> None:
    path = script(
        ONCE.format(then="print('here', flush=True)\n    time.sleep(1 if first else 0)\n    raise SystemExit(4)")
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        refused = run("--join", address, path)
        assert refused.exit_code == 2 and "--join needs the job's secret" in refused.stderr
        with started("--join", address, "--open", "--timeout", 1, "--log", "log", path) as process:
            assert process.stdout is not None and process.stdout.readline() == "[0] here\n"
            server.close()
            _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 4, errors
    assert f"the control plane at {address} cannot be reached any more" in errors


def test_a_launcher_that_nobody_answers_is_refused(script: Script) -> None:
    result = run("--join", "127.0.0.1:1", "--timeout", 1, script("print('never')"))
    assert result.exit_code == 2 and "no launcher listens at 127.0.0.1:1 within 1 s" in result.stderr


def test_a_port_in_use_is_named(script: Script) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        result = run("--elastic", "1:2", "--listen", address, script("print('never')"))
    assert result.exit_code == 2
    assert f"cannot listen at {address}: Address already in use" in result.stderr


def test_an_elastic_run_is_not_written_over(script: Script, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    (log / "elastic.json").write_text("{}")
    refused = run("--elastic", "1:2", "--log", log, script("print('never')"))
    assert refused.exit_code == 2 and "already holds an elastic run" in refused.stderr
    refused = run("--again", log)
    assert refused.exit_code == 2 and "is no record of an elastic run" in refused.stderr
    refused = run("--again", "nowhere")
    assert refused.exit_code == 2 and "does not exist" in refused.stderr
    assert run("--workers", 0).exit_code == 2
