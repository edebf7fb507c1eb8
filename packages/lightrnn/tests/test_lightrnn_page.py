# SPDX-License-Identifier: Apache-2.0
"""What the page of this package says is true: its programs run, its commands and files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from paceline_lightrnn.commands.command import app

PAGE = Path(__file__).parents[1] / "docs" / "lightrnn.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^\$ paceline lightrnn (.+?)(?:  #.*)?$", TEXT, flags=re.MULTILINE)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_page_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[number], f"program {number} of {PAGE.name}", "exec"), {"__name__": "__main__"})


def test_its_commands_exist_with_their_options() -> None:
    group = typer.main.get_command(app)
    assert COMMANDS and isinstance(group, TyperGroup)
    for line in COMMANDS:
        name, *arguments = shlex.split(line)
        context = group.make_context("paceline lightrnn", [name])
        command = group.get_command(context, name)
        assert command is not None, line
        command.make_context(name, arguments, parent=context)  # ends with an error where an option does not exist


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links and all((PAGE.parent / link).exists() for link in links)
