# SPDX-License-Identifier: Apache-2.0
"""What the page of this package says is true: its programs run, its commands and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from paceline_dual.commands.command import app

PAGE = Path(__file__).parents[1] / "docs" / "dual.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_page_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[number], f"program {number} of {PAGE.name}", "exec"), {"__name__": "__main__"})


def test_the_commands_it_names_exist() -> None:
    named = set(re.findall(r"`paceline dual (\w+)", TEXT))
    group = typer.main.get_command(app)
    assert named and isinstance(group, TyperGroup) and named == set(group.commands)


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links and all((PAGE.parent / link).exists() for link in links)
