# SPDX-License-Identifier: Apache-2.0
"""What is a program: Python, a module, or any executable; and executables on workers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.cli.run.program import find, python_program
from tests.paths import python_path

PROGRAM, OBJECT_FILE = 2, 1


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setenv("PYTHONPATH", python_path())


def made(name: str, content: bytes, mode: int = 0o755) -> Path:
    path = Path(name)
    path.write_bytes(content)
    path.chmod(mode)
    return path


def elf(kind: int) -> bytes:
    """The first bytes of an ELF file for little-endian machines of 64 bits."""
    return b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + kind.to_bytes(2, "little") + bytes(64)


def refused(capsys: pytest.CaptureFixture[str], path: Path, module: bool = False) -> str:
    with pytest.raises(typer.Exit) as info:
        find(path, module=module)
    assert info.value.exit_code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    "content",
    [
        elf(PROGRAM),
        b"#!/bin/sh\necho hello\n",
        b"#! /usr/bin/env -S A=1 sh -e\n",
        b"#!/usr/bin/env perl\n# python it is not\n",
    ],
)
def test_an_executable_is_known_by_its_first_bytes(content: bytes) -> None:
    program = find(made("tool", content), ["--", "-m", "model"])
    assert program.is_tool
    assert program.command() == program.command(zero_lines=True) == ["./tool", "-m", "model"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.py", b"#!/bin/sh\n# the name says that it is Python\n"),
        ("train", b"print(1)\n"),
        ("train", b"#!/usr/bin/env python3\nprint(1)\n"),
        ("train", b"#!/opt/venv/bin/python3.11 -u\nprint(1)\n"),
        ("train", b"#!/usr/bin/env -S X=1 python -u\nprint(1)\n"),
        ("train", b"#!/bin/sh\n'''exec' \"/a very long path/bin/python3\" \"$0\" \"$@\"\n' '''\nprint(1)\n"),
    ],
)
def test_a_python_program_stays_one(name: str, content: bytes) -> None:
    program = find(made(name, content, 0o644), ["--lr", "1"])
    assert not program.is_tool
    assert program.command() == [sys.executable, "-u", name, "--lr", "1"]
    assert program.command(zero_lines=True)[2:5] == ["-m", "paceline_plugins.zero", name]


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (elf(PROGRAM), 0o644, "chmod +x tool"),
        (elf(OBJECT_FILE), 0o755, "link it first"),
        (b"#!/bin/sh\n", 0o644, "chmod +x tool"),
        (b"#!/bin/shh\n", 0o755, "names '/bin/shh', which this machine does not have"),
        (b"#!/bin/sh\r\necho\r\n", 0o755, "/bin/sh\\r"),
        (b"MZ\x90\0\x03\0\0\0", 0o755, "neither Python (it holds null bytes, as binary files do) nor an executable"),
    ],
)
def test_a_file_that_no_worker_could_run_is_refused(
    content: bytes, mode: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(capsys, made("tool", content, mode))


def test_a_module_is_found_without_being_imported() -> None:
    Path("mine/inner").mkdir(parents=True)
    for name in ("mine/__init__.py", "mine/inner/train.py", "mine/__main__.py"):
        Path(name).write_text("raise SystemExit('imported')")
    program = find(Path("mine.inner.train"), ["--lr", "1"], module=True)
    assert program.source is not None and program.source.resolve() == Path("mine/inner/train.py").resolve()
    assert program.root == Path.cwd().resolve()
    assert program.command() == [sys.executable, "-u", "-m", "mine.inner.train", "--lr", "1"]
    package = find(Path("mine"), module=True)
    assert package.source is not None and package.source.name == "__main__.py" and package.root == Path.cwd().resolve()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def words(result: Result) -> str:
    return " ".join(result.stderr.replace("│", " ").split())


def test_what_only_python_has_is_refused_for_executables(capsys: pytest.CaptureFixture[str]) -> None:
    tool = made("tool", b"#!/bin/sh\n")
    for option in ("--force-zero-lines", "--random-data"):
        assert f"{option} is for Python programs, and tool is an executable" in words(run("--workers", 2, option, tool))
    with pytest.raises(typer.Exit):
        python_program(tool, None, "sim runs Python")
    assert "sim runs Python, and tool is an executable" in " ".join(capsys.readouterr().err.replace("│", " ").split())


C_TOOL = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int count, char **words) {
    const char *rank = getenv("RANK"), *restart = getenv("PACELINE_RESTART");
    printf("%s of %s at %s, restart %s, %s\\n", rank, getenv("WORLD_SIZE"), getenv("MASTER_ADDR"), restart, words[1]);
    fprintf(stderr, "reading the model\\n");
    return !strcmp(rank, "1") && !strcmp(restart, "0") ? 3 : 0;
}
"""
SHELL_TOOL = """#!/bin/sh
echo "$RANK of $WORLD_SIZE at $MASTER_ADDR, restart $PACELINE_RESTART, $1"
echo "reading the model" >&2
if [ "$RANK$PACELINE_RESTART" = 10 ]; then exit 3; fi
"""


@pytest.mark.processes
def test_a_compiled_tool_fails_restarts_and_has_to_attach() -> None:
    tool = Path("tool")
    compiler = shutil.which("cc")
    if compiler is None:
        made("tool", SHELL_TOOL.encode())
    else:
        Path("tool.c").write_text(C_TOOL)
        subprocess.run([compiler, "-o", "tool", "tool.c"], check=True)
    result = run("--workers", 2, "--restarts", 1, "--log", "log", "./tool", "--model")
    assert "[1] 1 of 2 at 127.0.0.1, restart 0, --model" in result.stdout.splitlines()
    assert {f"[{k}] {k} of 2 at 127.0.0.1, restart 1, --model" for k in (0, 1)} <= set(result.stdout.splitlines())
    assert "[1] reading the model" in result.stderr.splitlines()
    assert f"worker 1 on {socket.gethostname()} failed" in result.stderr, "worker 0 ended with code 0"
    assert "exit code 3" in result.stderr and "(1 of 1 restarts)" in result.stderr
    assert Path("log/output/rank-001.2.out").is_file() and tool.is_file()
    assert result.exit_code == 1
    assert "nothing attached paceline" in result.stderr and "paceline blocks" in words(result)


@pytest.mark.processes
def test_a_module_runs_as_it_is_and_with_zero_lines() -> None:
    Path("mine").mkdir()
    Path("mine/__init__.py").touch()
    Path("mine/part.py").write_text("text = 'the package around it'")
    Path("mine/train.py").write_text(
        "import sys\nfrom . import part\nprint(__name__, __package__, __spec__.name, part.text, sys.argv[1:])"
    )
    said = "__main__ mine mine.train the package around it ['--lr', '1']"
    result = run("--workers", 2, "--as-is", "-m", "mine.train", "--lr", 1)
    assert result.exit_code == 0, result.output
    assert {f"[0] {said}", f"[1] {said}"} <= set(result.stdout.splitlines())
    zero = [sys.executable, "-m", "paceline_plugins.zero", "-m", "mine.train", "--lr", "1"]
    done = subprocess.run(zero, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False)
    assert said in done.stdout, done.stderr
