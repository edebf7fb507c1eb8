# SPDX-License-Identifier: Apache-2.0
"""Options in `paceline.toml` and in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.cli.console import settings_file

FILE = settings_file.NAME


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trains')\n")
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def printed(*options: str) -> str:
    """What a worker of two hosts would be started with."""
    result = call("run", "--as-is", "--hosts", "2", "--master", "10.0.0.1:2000", "--print", *options, "train.py")
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.plugins
def test_a_command_line_overrides_the_environment_and_that_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "paceline run --hosts 2 --master 10.0.0.1:2000 --as-is --host-index 1" in printed()
    Path(FILE).write_text('workers = 3\nrule = "averaging"\n')
    assert "--rule averaging" in printed() and "--workers 3" in printed().partition("other hosts")[2]
    monkeypatch.setenv("PACELINE_RUN_WORKERS", "4")
    monkeypatch.setenv("PACELINE_RUN_WORKER", "4")
    said = printed()
    assert "--workers 4" in said.partition("other hosts")[2] and "--workers 3" not in said
    assert (
        "PACELINE_RUN_WORKER is no variable of paceline and is ignored (did you mean 'PACELINE_RUN_WORKERS'?)" in said
    )
    assert "--workers 5" in printed("--workers", "5").partition("other hosts")[2]


@pytest.mark.plugins
def test_the_nearest_file_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / FILE).write_text("workers = 3\n")
    inner = folder / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "train.py").touch()
    (folder / "a" / "pyproject.toml").write_text("[project]\nname = 'other'\n[broken\n")  # says nothing about paceline
    monkeypatch.chdir(inner)
    assert "--workers 3" in printed()
    (folder / "a" / "pyproject.toml").write_text("[tool.paceline.run]\nworkers = 2\nrule = 'sync'\n")
    assert "--workers 2" in printed() and "--rule sync" in printed()
    (inner / FILE).write_text("")
    assert "--workers" not in printed()


@pytest.mark.plugins
def test_settings_of_other_commands_stand_in_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(FILE).write_text("workers = 2\n[sim]\nworkers = 0\n[plan]\n")
    assert "--workers 2" in printed()
    assert "--workers must lie in 1..4096, got 0" in call("sim", "train.py").output
    monkeypatch.setenv("PACELINE_SIM_WORKERS", "-1")
    assert "--workers must lie in 1..4096, got -1" in call("sim", "train.py").output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wrokers = 2", "wrokers is no option of paceline run (did you mean 'workers'?)"),
        ("workers = true", "workers of paceline run is a number or a text, got True"),
        ("workers = 'two'", "workers of paceline run: "),
        ("quiet = 1", "quiet of paceline run is true or false, got 1"),
        ("[rnu]\nworkers = 2", "[rnu] is no command of paceline (did you mean 'run'?)"),
        ("workers = 1\n[run]\nworkers = 1", "sets workers at the top and in [run]"),
        ("workers =", "cannot be read as TOML"),
        ("rule = 'bmuf(perod=3)'", "perod"),
        ("[sim]\nwrokers = 3", "wrokers is no option of paceline sim (did you mean 'workers'?)"),
    ],
)
def test_mistakes_in_a_file_are_refused_before_anything_starts(text: str, message: str) -> None:
    Path(FILE).write_text(text)
    result = call("run", "--as-is", "train.py")
    assert result.exit_code == 2 and message in result.output and "trains" not in result.output
