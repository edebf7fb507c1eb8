# SPDX-License-Identifier: Apache-2.0
"""`paceline settings`: which options a file or the environment sets, and a file to begin with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.console import near, out, refuse, refusing, settings_file, without_secrets
from paceline_plugins.ssh import hosts

BEGINNING = """\
# Options of `paceline run`, by their names without the dashes; `paceline settings` checks this file and shows them.
# A command line overrides the environment (PACELINE_RUN_WORKERS), and this overrides the file.

# workers = 4
# rule = "bmuf(period=16)"
# log = "logs/newest"
# overwrite = true

# [hosts.b]        # a machine of --hosts a,b that differs from the others
# workers = 2
# python = "/opt/venv/bin/python"

# [sim]            # of other commands in tables
# workers = 16
"""


def command(
    ctx: typer.Context,
    write: Annotated[bool, typer.Option("--write", help=f"Write a {settings_file.NAME} to begin with, here.")] = False,
) -> None:
    """Show the options that a file or the environment sets."""
    if write:
        _write(Path.cwd() / settings_file.NAME)
        return
    assert ctx.parent is not None
    found = ctx.find_object(settings_file.SettingsFile)
    values = {} if found is None else found.values
    machines = {} if found is None else found.hosts
    with refusing():
        hosts.check(machines)
    if found is None:
        out().print(
            f"no {settings_file.NAME} and no [tool.paceline] in {settings_file.PYPROJECT} from here upwards",
            markup=False,
        )
    else:
        out().print(f"{near(found.path)}: in order", markup=False)
    for name, table in machines.items():
        rows = ", ".join(f"{key} = {'...' if key == 'environment' else value}" for key, value in table.items())
        out().print(f"[hosts.{name}] {rows}".rstrip(), markup=False, soft_wrap=True)
    shown = len(machines)
    for name, one in ctx.parent.command.own(ctx.parent).items():  # type: ignore[attr-defined]
        for key, option in settings_file.options(one).items():
            line = _line(name, key, option, values.get(name, {}))
            if line:
                out().print(without_secrets(line), markup=False, soft_wrap=True)
                shown += 1
    if not shown:
        out().print("nothing is set")


def _line(name: str, key: str, option: Any, values: Any) -> str:
    """What sets an option; "" if nothing does."""
    variable = f"PACELINE_{name}_{option.name}".upper()
    if os.environ.get(variable):
        overridden = ", and not the file" if option.name in values else ""
        return f"paceline {name} --{key} {os.environ[variable]}  ({variable}{overridden})"
    return f"paceline {name} --{key} {values[option.name]}" if option.name in values else ""


def _write(path: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(BEGINNING)
    except FileExistsError:
        refuse(f"{near(path)} exists: change it, or remove it")
    except OSError as error:
        refuse(f"{near(path)} cannot be written ({error.strerror})")
    out().print(f"{near(path)} is written: uncomment what you want, and look at it with paceline settings")
