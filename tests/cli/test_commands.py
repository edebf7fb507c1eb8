# SPDX-License-Identifier: Apache-2.0
"""`paceline`, `paceline report`, `paceline explain`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import paceline
from paceline.cli import app
from paceline.rules.recipes import RECIPES


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def make_run(directory: Path, workers: int) -> Path:
    directory.mkdir(parents=True)
    for rank in range(workers):
        stamp = {"at_s": 10.0, "rank": rank, "total_minibatches": 50, "total_samples": 1600}
        events = [
            {"kind": "attach", "at_s": 0.0, "rank": rank, "size": workers, "rule": "bmuf()"},
            {"kind": "value", "name": "loss", "value": 1.25, **stamp},
            {"kind": "exchange", "minibatches": 50, "samples": 1600, "compute_s": 9.0, "exchange_s": 1.0,
             "bytes": 2000, **stamp},
        ]  # fmt: skip
        text = "".join(json.dumps(event) + "\n" for event in events)
        (directory / f"rank-{rank:03d}.jsonl").write_text(text)
    return directory


@pytest.mark.processes
def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"],
        env={"PYTHONPATH": str(Path(paceline.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    assert done.stdout == f"paceline {paceline.__version__}\n"


@pytest.mark.plugins
def test_report_writes_the_page_and_prints_the_numbers(tmp_path: Path) -> None:
    result = call("report", make_run(tmp_path / "run", 2), "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"report: {tmp_path / 'out' / 'index.html'}" in result.stdout
    assert (tmp_path / "out" / "index.html").exists()
    rows = {line.split("  ")[0].strip(): line.split()[-1] for line in result.stdout.splitlines()}
    assert rows["loss (training)"] == "1.2500"
    assert rows["workers"] == "2"
    assert rows["samples per second"] == "320"
    assert "problem: Workers 0, 1 never closed the run" in result.stderr


@pytest.mark.plugins
def test_report_takes_the_newest_run_and_writes_into_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, at_s in (("new", 2e9), ("old", 1e9)):
        for path in make_run(Path("paceline-logs", name), 1).iterdir():
            os.utime(path, (at_s, at_s))
    for arguments in ([], ["paceline-logs"]):
        assert "report: paceline-logs/new/report/index.html\n" in call("report", *arguments).stdout


@pytest.mark.plugins
@pytest.mark.parametrize(("name", "says"), [("nowhere", "does not exist"), ("", "no run has logs")])
def test_report_refuses_what_is_no_run(tmp_path: Path, name: str, says: str) -> None:
    result = call("report", tmp_path / name, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


def test_explain_lists_every_recipe() -> None:
    result = call("explain")
    assert result.exit_code == 0
    assert RECIPES
    for recipe in RECIPES.values():
        assert recipe.name in result.stdout
        assert recipe.summary in result.stdout


def test_explain_follows_the_settings_and_the_workers() -> None:
    result = call("explain", "bmuf(period=5, gain='paper')", "--workers", 4)
    assert "every 5 minibatches" in result.stdout
    assert "momentum     0.75" in result.stdout
    assert "numbers with 4 workers" in result.stdout


@pytest.mark.parametrize(("system", "command"), [("darwin", "run"), ("win32", "sim"), ("darwin", "blocks")])
def test_other_systems_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, command: str
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(sys, "platform", system)
    result = call(command, tmp_path / "train.py")
    assert result.exit_code == 2
    assert f"needs Linux, and this is {system}" in " ".join(result.output.split())
