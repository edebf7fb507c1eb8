# SPDX-License-Identifier: Apache-2.0
"""The command and its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import data, doctor, explain, report, sim, trace, watch
from paceline.cli.installed import Commands
from paceline.cli.plan import command as plan
from paceline.cli.program_options import ProgramCommand
from paceline.cli.run import command as run
from paceline.cli.tune import command as tune
from paceline.cli.tune import search

app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="Give the training program you already have a cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("run", cls=ProgramCommand, context_settings=run.CONTEXT, epilog=run.EPILOG)(run.command)
app.command("sim", cls=ProgramCommand, context_settings=run.CONTEXT)(sim.command)
app.command("watch")(watch.command)
app.command("report")(report.command)
app.command("trace")(trace.command)
app.command("tune", cls=search.TuneOrSearch, epilog=search.EPILOG)(tune.command)
app.command("explain")(explain.command)
app.command("plan", cls=ProgramCommand, context_settings=plan.CONTEXT)(plan.command)
app.command("doctor")(doctor.command)
app.add_typer(data.app, name="data")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Give the training program you already have a cluster."""
