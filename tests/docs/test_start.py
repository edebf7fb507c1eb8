# SPDX-License-Identifier: Apache-2.0
"""The programs and commands of docs/guide/start.md, on less text."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

PAGE = Path(paceline.__file__).parents[2] / "docs" / "guide" / "start.md"

if not PAGE.is_file():
    pytest.skip("the documents are not beside the package", allow_module_level=True)

TEXT = PAGE.read_text(encoding="utf-8")


def programs() -> list[str]:
    """The page's two, on an eighth of the text."""
    found = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    return [program.replace("10_000", "1_000").replace("100_000", "12_000") for program in found]


def commands() -> list[str]:
    """What the page types after the installation."""
    lines = "\n".join(re.findall(r"^```console\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)).splitlines()
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in typed if line.startswith(("python ", "paceline "))]


def test_the_commands_are_those_of_a_first_hour() -> None:
    assert [line.split(" ")[:2] for line in commands()] == [
        ["python", "train.py"],
        ["paceline", "run"],
        ["python", "two_lines.py"],
        ["paceline", "run"],
        ["paceline", "report"],
        ["paceline", "sim"],
    ]


def test_the_second_program_is_the_first_with_two_lines() -> None:
    one, two = (program.splitlines() for program in programs())
    assert sum("# 1" in line or "# 2" in line for line in two) == 2
    until = one.index("for epoch in range(2):")
    added = [line for line in two[: two.index("for epoch in range(2):")] if line not in one]
    assert [line for line in one[:until] if line not in two] == []
    assert len(added) == 2  # the import and line 1


def test_with_two_lines_one_worker_is_the_program_and_sixteen_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = []
    for name, program in zip(("train.py", "two_lines.py"), programs(), strict=True):
        Path(name).write_text(program, encoding="utf-8")
        runpy.run_path(name, run_name="__main__")
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    losses(said[0])
    paceline.simulate("two_lines.py", 16)
    losses(capsys.readouterr().out)


def losses(output: str) -> None:
    """Two epochs, of which the second is better; guessing has 4.85."""
    first, second = map(float, re.findall(r"epoch \d: held-out loss (\d\.\d{3})", output))
    assert second < first < 4.5


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)  # six programs, one after another
def test_all_of_it_works(tmp_path: Path) -> None:
    for name, program in zip(("train.py", "two_lines.py"), programs(), strict=True):
        (tmp_path / name).write_text(program, encoding="utf-8")
    said = {line: run(line, tmp_path) for line in commands()}
    for line, output in said.items():
        if "report" not in line:
            losses(output)
    assert (tmp_path / "model.pt").is_file()
    assert (tmp_path / "logs" / "four" / "report" / "index.html").is_file()


def run(line: str, folder: Path) -> str:
    words = re.findall(r'"[^"]+"|\S+', line)
    words = [word.strip('"') for word in words]
    program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "paceline"]
    source = os.pathsep.join([str(Path(paceline.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*program, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
