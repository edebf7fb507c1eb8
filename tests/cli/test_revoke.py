# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""`paceline revoke`: a worker of a running job is put out and stays out, and what cannot be done is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.tls import TLS
from paceline.errors import RefusedError
from paceline.flow.control.client import ControlClient
from paceline.flow.control.messages import About
from paceline_plugins.sites import revocations, saved_plan
from paceline_plugins.sites.saved_plan import SavedPlan
from tests.cli.test_elastic import DEADLINE_S, MEMBER, events, until
from tests.cli.test_run import Script, _here, script, started  # noqa: F401


def revoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["revoke", *map(str, arguments)], env={"COLUMNS": "300"})


@pytest.mark.processes
def test_a_worker_is_put_out_and_its_successors_are_refused(script: Script, tmp_path: Path) -> None:
    """The other one trains on; the launcher starts no more in that place, and nobody else gets in with it."""
    log, path = tmp_path / "log", script(MEMBER.format(then=""))
    with started("--elastic", "1:2", "--workers", 2, "--timeout", 60, "--log", log, path) as process:
        until(lambda: len(events(log, "joined")) == 2)
        until(lambda: any(len(event["members"]) == 2 for event in events(log, "generation")))
        said = revoke(log, "--worker", 1, "--why", "its key was stolen")
        assert said.exit_code == 0 and said.output == "revoked; put out: worker 1\n", said.output
        where = json.loads((log / saved_plan.NAME).read_text())["plan"]["control"]
        places = [TLS.folder(log / "certificates" / "host-0" / f"place-{place}") for place in range(2)]
        (place,) = [k for k in range(2) if [places[k].identity.id] == events(log, "revoked")[0]["certificates"]]
        about = About("here", "127.0.0.1", 1, {})
        with pytest.raises(RefusedError, match=r"is refused: its certificate was revoked: its key was stolen"):
            ControlClient(where[0], where[1], about, places[place], DEADLINE_S)
        (tmp_path / "enough").touch()
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert "certificates were revoked: its key was stolen" in errors
    assert f"[{place}] this worker is lost: " in errors and "revoked, so no more are started here" in errors
    assert [event["worker"] for event in events(log, "joined")] == [0, 1]
    assert [event["worker"] for event in events(log, "lost")] == [1]
    assert not list(log.glob("revoke-*"))


def plan(tmp_path: Path, **changes: Any) -> Path:
    """A log directory of a launcher that does not run."""
    facts = {
        "command": [], "environment": {}, "folder": ".", "workers": 1, "control": ("127.0.0.1", 1), "leads": True,
        "bounds": (1, 2), "timeout_s": 1.0, "grace_s": None, "tls": "certificates/host-0", "unix_s": 0.0,
    }  # fmt: skip
    saved_plan.write(tmp_path / "run", SavedPlan(**{**facts, **changes}), [])
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({}, [], "give --worker N, --certificate FILE or --unknown"),
        ({"tls": None}, ["--worker", 1], "this run has no certificates (--open), so nobody can be kept out"),
        ({"leads": False}, ["--worker", 1], "has joined the run at 127.0.0.1:1: revoke in the log directory of the"),
        ({}, ["--certificate", "nowhere.pem"], "--certificate: cannot read the certificate nowhere.pem"),
    ],
)
def test_what_cannot_be_revoked(tmp_path: Path, changes: dict[str, Any], options: list[object], says: str) -> None:
    said = revoke(plan(tmp_path, **changes), *options)
    assert said.exit_code == 2 and says in " ".join(said.output.replace("│", "").split()), said.output


def test_only_an_elastic_run_can_revoke(tmp_path: Path) -> None:
    said = revoke(tmp_path, "--worker", 1)
    assert said.exit_code == 2 and "holds no elastic run (no elastic.json)" in said.output


def test_a_launcher_that_does_not_run_carries_it_out_when_it_does(tmp_path: Path) -> None:
    """It is asked for the certificate of a file, which has never joined."""
    run, tls = plan(tmp_path), Authority.new().issue(tmp_path / "stolen", "stolen", "worker")
    said = revoke(run, "--certificate", tls.certificate, "--unknown")
    assert said.exit_code == 1 and "takes effect with `paceline run --again" in said.output
    got: list[Any] = []

    def carry_out(*asked: Any) -> list[int]:
        got.append(asked)
        return [3]

    revocations.serve(run, carry_out)
    revocations.serve(run, carry_out)
    assert got == [([], [tls.identity.id], True, "by the operator")]
    (answer,) = run.glob("revoke-*.answer.json")
    assert revocations.answer_to(run, answer.name.removesuffix(".answer.json")) == {"workers": [3]}


@pytest.mark.parametrize("text", ["{", "[]", '{"workers": ["1"], "certificates": [], "why": "", "unknown": false}'])
def test_requests_that_are_none_are_answered(tmp_path: Path, text: str) -> None:
    (tmp_path / "revoke-1.request.json").write_text(text)
    revocations.serve(tmp_path, lambda *_: [])
    said = revocations.answer_to(tmp_path, "revoke-1")
    assert said is not None and said["refused"]
