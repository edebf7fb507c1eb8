# SPDX-License-Identifier: Apache-2.0
"""The programs for zero lines: they know nothing of paceline, and work as they are."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "zero_lines"

if not EXAMPLE.is_dir():
    pytest.skip("the examples are not beside the package", allow_module_level=True)

PROGRAMS = sorted(EXAMPLE.glob("*.py"))

TINY = {
    "gcn": "--epochs 20 --papers 1000 --lr 0.02 --log-interval 5",
    "siamese": "--epochs 1 --pairs 1000 --test-pairs 200 --noise 0.2",
    "super_resolution": "--epochs 1 --patch-size 32 --stride 64 --out checkpoints",
}


def imported(program: Path) -> set[str]:
    """The top-level packages that a program imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_only_the_programs_with_two_lines_know_of_paceline(program: Path) -> None:
    assert ("paceline" in imported(program)) == program.stem.endswith("_two_lines")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_page_says_what_each_program_is(program: Path) -> None:
    assert f"`{program.name}`" in (EXAMPLE / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TINY)
def test_a_program_learns_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "sklearn" in imported(EXAMPLE / f"{name}.py"):
        pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *TINY[name].split()])
    runpy.run_path(str(EXAMPLE / f"{name}.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    tests = [float(found) for line in lines for found in re.findall(r"test loss (\d+\.\d{4})", line)]
    last = re.fullmatch(r"final loss (\d+\.\d{4})", lines[-1])
    assert last is not None
    assert float(last[1]) == tests[-1] < tests[0]
    if name == "super_resolution":
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch_01.pt"]
