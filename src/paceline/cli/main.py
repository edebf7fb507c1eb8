# SPDX-License-Identifier: Apache-2.0
"""The command and its subcommands."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import explain, sim, watch
from paceline.cli.console import refuse, refusing, settings_file
from paceline.cli.console.program_options import CONTEXT, ProgramCommand
from paceline.cli.installed import Commands
from paceline.cli.run.command import EPILOG, HELP, RunCommand, run

app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="Give the training program you already have a cluster.",
    no_args_is_help=True,
    context_settings={"auto_envvar_prefix": "PACELINE"},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("run", cls=RunCommand, context_settings=CONTEXT | HELP, epilog=EPILOG)(run)
app.command("sim", cls=ProgramCommand, context_settings=CONTEXT)(sim.command)
app.command("watch")(watch.command)
app.command("explain")(explain.command)

STARTERS = ("run", "blocks", "sim")
"""Commands that start workers."""


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, allow_from_autoenv=False, help="Print the version."
        ),
    ] = False,
) -> None:
    """Give the training program you already have a cluster."""
    if sys.platform != "linux" and ctx.invoked_subcommand in STARTERS:
        refuse(
            f"paceline {ctx.invoked_subcommand} starts workers on Linux only, and this is {sys.platform}: on Windows "
            "take WSL2, on a Mac a container or a machine with Linux"
        )
    assert isinstance(ctx.command, Commands)
    with refusing():
        result = settings_file.load(Path.cwd(), ctx.command.own, partial(ctx.command.get_command, ctx))
    ctx.obj = result
    if result is not None:
        ctx.default_map = dict(result.values)
