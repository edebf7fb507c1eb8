# SPDX-License-Identifier: Apache-2.0
"""An option of ours after the program would be swallowed: it is refused with the right order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

import paceline
from paceline.cli import app
from paceline.cli.console.program_options import split

ROOT = Path(paceline.__file__).parents[2]
PACELINE: Any = typer.main.get_command(app)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PACELINE_RULE", raising=False)
    Path("ok.py").write_text("import sys\nprint('arguments', sys.argv[1:])\n")


def call(line: str) -> Result:
    return CliRunner().invoke(app, shlex.split(line))


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("run --quiet ok.py --epochs 3 --rule=bmuf x", "run --quiet --rule=bmuf ok.py --epochs 3 x"),
        ("sim ok.py --workers 4 --quiet", "sim --workers 4 --quiet ok.py"),
        ("plan ok.py --network 1gbe --json", "plan --network 1gbe --json ok.py"),
        ("tune --search lr=uniform(1,2) ok.py --groups 2", "tune --search 'lr=uniform(1,2)' --groups 2 ok.py"),
        ("run --elastic 1:2 ok.py --workers 2", "run --elastic 1:2 --workers 2 ok.py"),
    ],
)
def test_an_option_after_the_program_is_refused_with_the_right_order(line: str, right: str) -> None:
    done = call(line)
    assert done.exit_code == 2
    assert f" {right} " in done.stderr, done.stderr
    assert not Path("paceline-logs").exists(), "something was started"


def test_split_takes_values_along_and_ends_at_two_dashes() -> None:
    takes = {"--workers": True, "--quiet": False}
    assert split(["a", "--workers", "4", "--quiet", "b"], takes) == (["--workers", "4", "--quiet"], ["a", "b"])
    assert split(["--quiet=yes", "--workers=4", "--", "--quiet"], takes) == (
        ["--workers=4"],
        ["--quiet=yes", "--", "--quiet"],
    )
    assert split(["--workers"], takes) == (["--workers"], [])


NAMES = "run|sim|plan|blocks|watch|report|tune|verify|join|relay|revoke|doctor|explain"


def documented(names: str = "run|sim|plan") -> list[str]:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*/*.md"), *(ROOT / "examples").rglob("*.md"),
             *(ROOT / "examples").rglob("*.py"), *(ROOT / "src").rglob("*.py")]  # fmt: skip
    found = [line for page in pages for line in re.findall(rf"paceline ((?:{names}) [^`|#\n]*)", page.read_text())]
    return sorted(set(found))


@pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="an installed package has no documents")
def test_the_documents_show_the_right_order() -> None:
    lines = [line for line in documented() if ".py" in line]
    assert len(lines) > 20
    for line in lines:
        words = re.split(r"\s+", line)
        program = next(k for k, word in enumerate(words) if re.search(r"\.py\b", word))
        command = PACELINE.get_command(None, words[0])
        options = {o: True for one in command.params for o in one.opts if o.startswith("--")}
        assert split(words[program + 1 :], options)[0] == [], line


@pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="an installed package has no documents")
def test_the_documents_name_options_that_there_are() -> None:
    unknown = set()
    for line in documented(NAMES):
        command, words = PACELINE, line.split()
        while words and hasattr(command, "get_command"):
            command = command.get_command(None, words.pop(0))
        known = {name for one in command.params for name in [*one.opts, *one.secondary_opts]} | {"--help", "--help-all"}
        for word in words:
            if word == "--" or ".py" in word or word.startswith("./") or word in ("train", "--search", "--again"):
                break  # the program's own follow, or another command's
            if re.fullmatch(r"--[a-z][a-z-]+", word) and word not in known:
                unknown.add(f"paceline {line}: {word}")
    assert not unknown
