# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""`paceline run --invite`, `paceline join` and `paceline relay`: hosts that cannot reach each other."""

from __future__ import annotations

import contextlib
import json
import signal
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline_plugins.sites import sites
from paceline_plugins.sites.relay.invitation import JOIN, LEAD, Invitation
from tests.cli.test_elastic import DEADLINE_S, events, until
from tests.cli.test_run import Script, _here, begun, script  # noqa: F401
from tests.ports import free_port

SEEN = """
    import os, time, torch, paceline
    from torch.utils.data import DataLoader, TensorDataset
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = paceline.attach(model, optimizer, "bmuf(period=4)")
    for epoch in range(run.epoch, 2):
        for (x,) in run.share(DataLoader(TensorDataset(torch.ones(200, 2)), batch_size=2)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            time.sleep(0.01)
    run.close()
    print("control", os.environ["PACELINE_CONTROL"], "relay", os.environ["PACELINE_RELAY"])
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "2000"})


def invitation(**more: object) -> str:
    """To a relay that nobody hosts."""
    known = {"host": "127.0.0.1", "port": 1, "fingerprint": bytes(16), "key": bytes(range(16)), "purpose": JOIN}
    return Invitation(**{**known, **more}).text()  # type: ignore[arg-type]


WRONG = {
    "no invitation": (("join",), "Missing argument 'INVITATION'"),
    "no program": (("join", invitation()), "no program was given"),
    "an address": (("join", "10.0.0.1:29600", "train.py"), "this is no invitation"),
    "truncated": (("join", invitation()[:-3], "train.py"), "the invitation is damaged"),
    "ended": (("join", invitation(until_s=1_700_000_000), "train.py"), "was good until 2023-11-14"),
    "the launcher's line": (("join", invitation(purpose=LEAD), "train.py"), "this is the other one"),
    "the joining line": (("run", "--elastic", "1:2", "--relay", invitation(), "train.py"), "this is the other one"),
    "no workers": (("join", "--workers", 0, invitation(), "train.py"), "--workers must be at least 1, got 0"),
    "too many workers": (("join", "--workers", 300, invitation(), "train.py"), "--workers must lie in 0..255"),
    "a late option": (("join", invitation(), "train.py", "--workers", 2), "--workers is after the program train.py"),
    "no such program": (("join", invitation(), "nowhere.py"), "nowhere.py does not exist"),
    "invite in a plain run": (("run", "--invite", "train.py"), "--invite belongs to --elastic"),
    "invite while joining": (("run", "--join", "h:1", "--invite", "train.py"), "--invite belongs to --elastic"),
    "relay in a plain run": (("run", "--relay", invitation(), "train.py"), "--relay belongs to --elastic"),
    "no address": (("run", "--elastic", "1:2", "--invite", "train.py"), "--invite needs --listen HOST:PORT"),
    "no port": (
        ("run", "--elastic", "1:2", "--invite", "--listen", "127.0.0.1:0", "train.py"),
        "--invite needs --listen HOST:PORT",
    ),
    "public alone": (("run", "--elastic", "1:2", "--public", "a:1", "train.py"), "give --invite as well"),
    "public is none": (
        ("run", "--elastic", "1:2", "--invite", "--listen", "127.0.0.1:9", "--public", "here", "train.py"),
        "--public must be HOST:PORT",
    ),
    "two relays": (("run", "--elastic", "1:2", "--invite", "--relay", invitation(), "train.py"), "give one of them"),
    "in the clear": (
        ("run", "--elastic", "1:2", "--invite", "--listen", "127.0.0.1:9", "--open", "train.py"),
        "leave --open out",
    ),
    "relay and listen": (
        ("run", "--elastic", "1:2", "--listen", "127.0.0.1:9", "--relay", invitation(), "train.py"),
        "--listen is for hosts that the others reach",
    ),
    "printed": (
        ("run", "--elastic", "1:2", "--invite", "--listen", "127.0.0.1:9", "--print", "train.py"),
        "--print starts nothing",
    ),
    "a relay at every address": (("relay", "--listen", "0.0.0.0:29700"), "takes one address of this host"),
    "a relay without a port": (("relay", "--listen", "127.0.0.1:0"), "must name a port"),
    "a relay elsewhere": (("relay", "--listen", "192.0.2.1:29700"), "cannot listen"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_uses_are_refused_with_a_sentence(case: str, script: Script) -> None:
    script(SEEN)
    arguments, says = WRONG[case]
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    for one in arguments:
        if str(one).startswith("paceline-"):
            assert str(one)[20:40] not in result.output  # it is a secret
    assert not list(Path().glob("paceline-*"))  # neither logs nor a relay's folder


def test_options_may_stand_on_both_sides_of_the_invitation(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script(SEEN)
    monkeypatch.setattr(sites, "FIND_S", 0.0)
    monkeypatch.setattr(sites, "LOOK_EVERY_S", 0.01)
    for order in (("--workers", 300, invitation()), (invitation(), "--workers", 300), (invitation(), "--workers=300")):
        assert "--workers must lie in 0..255" in call("join", *order, "train.py", "--lr", 1).stderr
    assert "cannot be reached" in call("join", invitation(), "train.py", "--", "--workers", 1).stderr


@pytest.mark.parametrize(
    "words", [("join", "LINE", "train.py"), ("run", "--elastic", "1:2", "--relay", "LINE", "train.py")]
)
def test_a_secret_on_the_command_line_is_refused(
    words: tuple[str, ...], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user of the host can read it there."""
    script(SEEN)
    purpose = JOIN if words[0] == "join" else LEAD
    typed = [invitation(purpose=purpose) if word == "LINE" else word for word in words]
    monkeypatch.setattr(sys, "argv", ["paceline", *typed])
    result = call(*typed)
    assert result.exit_code == 2 and "give - and paste the line" in result.stderr, result.output
    assert invitation()[20:40] not in result.output


@pytest.mark.parametrize("given", ["file", "input"])
def test_a_secret_comes_from_a_file_or_from_standard_input(
    given: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(SEEN)
    monkeypatch.setattr(sites, "FIND_S", 0.0)
    (tmp_path / "line").write_text(invitation() + "\n")
    said = CliRunner().invoke(
        app,
        ["join", "line" if given == "file" else "-", "train.py"],
        input=invitation() + "\n",
        env={"COLUMNS": "2000"},
    )
    assert "the relay at 127.0.0.1, port 1 cannot be reached" in said.stderr, said.output


@pytest.mark.processes
def test_a_host_joins_with_an_invitation_and_one_open_port(script: Script, tmp_path: Path) -> None:
    path, port = script(SEEN), free_port()
    door = tmp_path / "lead" / "certificates"
    where = f"127.0.0.1:{port}"
    lead = ("--elastic", "2:2", "--listen", where, "--invite", "--timeout", 45, "--log", "lead")
    with begun("run", *lead, path) as first:
        until(lambda: (door / "invitation").exists() and (door / "invitation").read_text().endswith("\n"))
        line = (door / "invitation").read_text().strip()
        foreign = Invitation.read(line)
        modes = [stat.S_IMODE(one.stat().st_mode) for one in (door, door / "invitation", door / "job.pem")]
        with begun("join", door / "invitation", "--log", "join", path) as second:
            printed, errors = second.communicate(timeout=DEADLINE_S)
        told, said = first.communicate(timeout=DEADLINE_S)
    assert (first.returncode, second.returncode) == (0, 0), (said, errors)
    assert f"[0] control {where} relay {where}" in printed  # all of it through the one port
    assert "[0] control 127.0.0.1:" in told and f" relay {where}" in told and f"control {where}" not in told
    assert "paceline join - PROGRAM" in said and f"\n{line}\n" in said
    members = events(tmp_path / "lead", "generation")[0]["members"]
    assert [len(place) for place in members] == [6, 6]  # each has a door
    assert json.loads((tmp_path / "join" / "elastic.json").read_text())["plan"]["timeout_s"] == 45  # the first host's
    assert modes == [0o700, 0o600, 0o600]
    assert not door.exists() and not (tmp_path / "join" / "certificates").exists()  # the run has ended well
    files = [one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()]
    assert not [text for text in files if foreign.key in text or line.encode() in text]  # in no log


@pytest.mark.slow  # records/2026-11-26_sites has the relay
@pytest.mark.processes
def test_hosts_behind_routers_meet_at_a_relay_which_may_die(script: Script, tmp_path: Path) -> None:
    path, where = script(SEEN), f"127.0.0.1:{free_port()}"
    folder = tmp_path / "paceline-relay"
    lines = [folder / name for name in ("lead", "join")]
    with begun("relay", "--listen", where) as one:
        until(lambda: all(line.exists() and line.read_text().endswith("\n") for line in lines))
        lead, join = (line.read_text().strip() for line in lines)
        assert call("relay", "--listen", where).exit_code == 2
        assert call("join", lead, path).exit_code == 2
        with begun("run", "--elastic", "2:2", "--relay", lines[0], "--timeout", 30, "--log", "lead", path) as first:
            until(lambda: events(tmp_path / "lead", "joined"))
            with begun("join", lines[1], "--log", "join", path) as second:
                until(lambda: events(tmp_path / "lead", "generation"))
                one.send_signal(signal.SIGKILL)
                one.communicate(timeout=DEADLINE_S)
                with begun("relay", "--listen", where) as another:
                    _, errors = second.communicate(timeout=DEADLINE_S)
                    _, said = first.communicate(timeout=DEADLINE_S)
                    another.send_signal(signal.SIGTERM)
                    printed, about = another.communicate(timeout=DEADLINE_S)
    assert (first.returncode, second.returncode, another.returncode) == (0, 0, 0), (said, errors, about)
    assert printed.splitlines() == [lead, join]  # the same as before
    assert f"members meet at the relay at {where}" in said


@pytest.mark.slow  # tests/cli/test_elastic.py has the launcher
@pytest.mark.processes
def test_a_launcher_with_a_relay_that_was_killed_is_followed_by_another(script: Script, tmp_path: Path) -> None:
    path, where, log = script(SEEN), f"127.0.0.1:{free_port()}", tmp_path / "lead"
    lead = ("--elastic", "2:2", "--listen", where, "--invite", "--timeout", 60, "--log", log)
    with begun("run", *lead, path) as first, contextlib.ExitStack() as stack:
        until(lambda: events(log, "joined"))
        second = stack.enter_context(begun("join", log / "certificates" / "invitation", "--log", "join", path))
        until(lambda: events(log, "generation"))
        first.kill()
        first.communicate(timeout=DEADLINE_S)
        line = (log / "certificates" / "invitation").read_text().strip()
        third = stack.enter_context(begun("run", "--again", log))
        _, said = third.communicate(timeout=DEADLINE_S)
        _, errors = second.communicate(timeout=DEADLINE_S)
    assert (third.returncode, second.returncode) == (0, 0), (said, errors)
    assert f"\n{line}\n" in said
