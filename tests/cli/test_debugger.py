# SPDX-License-Identifier: Apache-2.0
"""`paceline run --debugger RANK`: one worker waits for an editor, the others wait for the worker."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import debugger
from tests.paths import python_path

ZERO = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""
ATTACHED = (
    ZERO.replace("import torch\n", "import torch, paceline\n", 1)
    .replace(
        "for (x,) in DataLoader", "run = paceline.attach(model, optimizer, 'sync')\nfor (x,) in run.share(DataLoader"
    )
    .replace("batch_size=2):", "batch_size=2)):")
)
DEBUGPY = """
import pathlib, runpy, sys
words = sys.argv[1:]
pathlib.Path("debugged").write_text(" ".join(words))
assert words[0] == "--listen" and words[2] == "--wait-for-client"
rest = words[3:]
sys.argv = rest[1:] if rest[0] == "-m" else rest
if rest[0] == "-m":
    runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(rest[0], run_name="__main__")
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", f"{python_path()}:{tmp_path / 'lib'}")


@pytest.fixture
def debugpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugpy with the real one's command line, which waits for nobody."""
    (tmp_path / "lib" / "debugpy").mkdir(parents=True)
    (tmp_path / "lib" / "debugpy" / "__init__.py").touch()
    (tmp_path / "lib" / "debugpy" / "__main__.py").write_text(DEBUGPY)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


@pytest.mark.processes
@pytest.mark.usefixtures("debugpy")
@pytest.mark.parametrize(("program", "begins"), [(ZERO, "-m paceline_plugins.zero train.py"), (ATTACHED, "train.py")])
def test_one_worker_waits_and_all_train(tmp_path: Path, program: str, begins: str) -> None:
    Path("train.py").write_text(program)
    result = run("--workers", 2, "--rule", "sync", "--debugger", 1, "train.py", "--epochs", 3)
    assert result.exit_code == 0, result.output
    assert "worker 1 waits for a debugger at 127.0.0.1:5679" in result.output
    words = Path("debugged").read_text()
    assert words == f"--listen 127.0.0.1:5679 --wait-for-client {begins} --epochs 3"


@pytest.mark.usefixtures("debugpy")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--debugger", 2, "--workers", 2), "--debugger 2: the run has the workers 0 to 1"),
        (("--debugger", -1), "should be greater than or equal to 0"),
        (("--debugger", "first"), "should be a valid integer"),
        (("--debugger", 0, "--elastic", "1:2"), "--debugger is for runs of a fixed size"),
        (("--debugger", 0, "--print"), "--print starts nothing that --debugger could wait in"),
    ],
)
def test_a_debugger_that_cannot_be_is_refused(arguments: tuple[object, ...], sentence: str) -> None:
    Path("train.py").write_text(ATTACHED)
    result = run(*arguments, "train.py")
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


def test_an_executable_needs_another_debugger() -> None:
    tool = Path("tool")
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    result = run("--debugger", 0, tool)
    assert (result.exit_code, "gdb -p PID" in result.output) == (2, True)


def test_without_debugpy_the_run_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").write_text(ATTACHED)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "debugpy" else found(name))
    result = run("--debugger", 0, "train.py")
    assert (result.exit_code, "pip install debugpy" in result.output) == (2, True)


def test_only_the_host_that_has_the_worker_waits() -> None:
    command = [sys.executable, "-u", "train.py"]
    assert debugger.commands(3, LaunchCluster(2, 2, 0, ("a", 1)), command) == {}
    there = debugger.commands(3, LaunchCluster(2, 2, 1, ("a", 1)), command)
    assert there == {
        3: [sys.executable, "-u", "-m", "debugpy", "--listen", "127.0.0.1:5681", "--wait-for-client", "train.py"]
    }


@pytest.mark.parametrize(("typed", "seconds"), [([], 86_400.0), (["--timeout", "5"], 5.0)])
def test_the_others_wait_a_day_unless_a_timeout_was_typed(typed: list[str], seconds: float) -> None:
    seen: list[float] = []
    command = typer.Typer()

    @command.command()
    def main(ctx: typer.Context, timeout: float = 600.0) -> Any:
        seen.append(debugger.timeout(0, ctx))

    CliRunner().invoke(command, typed)
    assert seen == [seconds]


@pytest.mark.parametrize(("system", "command"), [("darwin", "run"), ("win32", "sim"), ("darwin", "blocks")])
def test_other_systems_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, system: str, command: str) -> None:
    Path("train.py").write_text(ZERO)
    monkeypatch.setattr(sys, "platform", system)
    result = CliRunner().invoke(app, [command, "train.py"])
    assert result.exit_code == 2
    assert f"on Linux only, and this is {system}" in " ".join(result.output.split())
