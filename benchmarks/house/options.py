# SPDX-License-Identifier: Apache-2.0
"""Options of each command of the wheel, as the command line's library knows them: a JSON object on stdout."""

from __future__ import annotations

import json

import click
import typer

from paceline.cli.main import app

ADDED = ("c", "config", "dual", "lightrnn")
"""Commands of packages that are installed beside."""


def show() -> None:
    """Print command -> number of options."""
    print(json.dumps(dict(sorted(_below(typer.main.get_command(app), "paceline")))))


def _below(command: click.Command, name: str) -> list[tuple[str, int]]:
    own = sum(one.param_type_name == "option" and one.name != "help" for one in command.params)
    rows = [(name, own)] if own else []
    if hasattr(command, "list_commands"):
        context = click.Context(command)
        for child in command.list_commands(context):
            below = command.get_command(context, child)
            if below is not None and child not in ADDED:
                rows += _below(below, f"{name} {child}")
    return rows
