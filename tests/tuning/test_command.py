# SPDX-License-Identifier: Apache-2.0
"""`paceline tune` against a run of two processes, and what it refuses by itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.tuning import request_files
from tests.paths import python_path

TRAINER = Path(__file__).with_name("trainer.py")
DEADLINE_S = 120.0


def tune(directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", str(directory), *arguments])


@contextlib.contextmanager
def running(folder: Path, rule: str) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--quiet",
        "--workers",
        "2",
        "--log",
        str(folder / "logs" / "a"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = python_path()
    whole = [*command, "--rule", rule, str(TRAINER), str(folder)]
    with subprocess.Popen(whole, text=True, stderr=subprocess.PIPE, env=environment) as process:
        try:
            until = time.monotonic() + DEADLINE_S
            while not all((folder / f"begun.{rank}").exists() for rank in range(2)):
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


@pytest.mark.slow  # tests/tuning tunes virtual workers
@pytest.mark.processes
@pytest.mark.timeout(200)
def test_a_run_of_two_processes(tmp_path: Path) -> None:
    with running(tmp_path, "bmuf(period=2)") as process:
        logs = tmp_path / "logs"
        refused = tune(logs, "--set", "betas=(0.5,0.9)")
        assert refused.exit_code == 1 and "SGD has no betas" in refused.output
        assert tune(logs, "--lr", "0.05", "--set", "period=4").exit_code == 0
        undone = tune(logs, "--revert")
        assert undone.exit_code == 0 and "lr@0 0.05 -> 0.1" in undone.output and "period 4 -> 2" in undone.output
        applied = tune(logs / "a", "--lr", "0.025", "--set", "period=3")
        assert applied.exit_code == 0 and "lr 0.1 -> 0.025, period 2 -> 3" in applied.output
        assert process.wait(DEADLINE_S) == 0, process.stderr and process.stderr.read()
    told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2)]
    assert told[0] == told[1] and told[0]["rates"] == [0.1, 0.05, 0.1, 0.025] and told[0]["period"] == 3
    over = tune(logs, "--lr", "0.1")
    assert over.exit_code == 1 and "is over" in over.output
    answers = sorted(path.name.split(".", 1)[1] for path in (logs / "a" / "tune").iterdir())
    assert answers == ["answer.json"] * 4 + ["taken.json"] * 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lr", "-1"], "at least 0"),
        (["--set", "lr"], "NAME=VALUE"),
        (["--set", "speed=3"], "cannot be tuned"),
        (["--revert", "--lr", "1"], "excludes other changes"),
        ([], "nothing to change was named: give --lr 0.01, --set NAME=VALUE"),
        (["period=4"], "a setting needs --set in front of it, got 'period=4': --set period=4"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anybody_is_asked(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "rank-000.jsonl").write_text("")
    result = tune(tmp_path, *arguments)
    assert result.exit_code == 2 and says in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "tune").exists()


def test_a_run_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_plugins.search.tune_command.WAIT_S", 0.0)
    (tmp_path / "rank-000.jsonl").write_text('{"kind": "attach", "at_s": 0.0, "rank": 0, "size": 1}\n')
    result = tune(tmp_path, "--lr", "1")
    assert result.exit_code == 1 and "withdrawn" in result.output
    assert list((tmp_path / "tune").iterdir()) == []


def test_nobody_asks_the_file_system_more_than_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []
    box = request_files.RequestFiles(tmp_path, each=False, clock=lambda: now[0])
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: asked.append(path) or listed(path))
    name = request_files.post(tmp_path, {"lr": 0.5}, False)
    for _ in range(100):
        now[0] += 0.009
        assert box.look() == []
    assert asked == []
    now[0] += 0.2
    assert [request.request_file for request in box.look()] == [name] and len(asked) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"changes": 3}', '{"changes": {"lr": "much"}}', "{}", " " * (1 << 17)])
def test_a_file_that_is_no_request_is_refused(text: str, tmp_path: Path) -> None:
    box = request_files.RequestFiles(tmp_path, each=False)
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "1.request.json").write_text(text)
    [request] = box.look(now=True)
    assert request.refused and request.changes == {}
