# SPDX-License-Identifier: Apache-2.0
"""The command and its subcommands."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import explain, sim, watch
from paceline.cli.console import err, refuse, refusing, settings_file
from paceline.cli.console.program_options import CONTEXT, ProgramCommand
from paceline.cli.installed import Commands
from paceline.cli.run.command import EPILOG, HELP, RunCommand, run
from paceline.core.parse import like

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
VARIABLES = (
    "LOG RUN RULE RULE_ASKED TIMEOUT_S TLS CONTROL RELAY RESUME RESTART EXCHANGED ROUND TRANSPORT CHECKPOINT PYTHON "
    "CHECKPOINT_EVERY TENSORBOARD WANDB METRICS RECEIPTS RECEIPTS_AUTHORITY RECEIPTS_UNTIL SEED RANDOM_DATA LINES "
    "TRITON ENDING LAUNCHED BEGAN"
)
"""After PACELINE_: what the launcher gives its workers, and a user may."""


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
        refuse(f"paceline {ctx.invoked_subcommand} needs Linux, and this is {sys.platform}: use WSL2 or a container")
    assert isinstance(ctx.command, Commands)
    with refusing():
        result = settings_file.load(Path.cwd(), ctx.command.own, partial(ctx.command.get_command, ctx))
    _warn_of_variables(ctx)
    ctx.obj = result
    if result is not None:
        ctx.default_map = dict(result.values)


def _warn_of_variables(ctx: typer.Context) -> None:
    """Warn of variables that neither a worker reads nor an option of a command takes."""
    assert isinstance(ctx.command, Commands)
    known = {f"PACELINE_{name}" for name in VARIABLES.split()}
    given = {one for one in os.environ if one.startswith("PACELINE_")} - known
    for name in ctx.command.own if given else ():
        if any(one.startswith(f"PACELINE_{name}_".upper()) for one in given):
            options = settings_file.options(ctx.command.get_command(ctx, name))
            known |= {f"PACELINE_{name}_{option}".upper().replace("-", "_") for option in options}
    for one in sorted(given - known):
        what = f"warning: {one} is no variable of paceline and is ignored{like(one, sorted(known))}"
        err().print(what, markup=False, soft_wrap=True)
