# SPDX-License-Identifier: Apache-2.0
"""The command and its subcommands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import explain, settings, sim, watch
from paceline.cli.console import refuse, refusing, settings_file
from paceline.cli.console.program_options import CONTEXT, ProgramCommand
from paceline.cli.installed import Commands
from paceline.cli.run.command import EPILOG, run
from paceline.cli.tune.command import tune
from paceline_plugins.data import command as data
from paceline_plugins.files.blocks_command.command import blocks
from paceline_plugins.forecast import doctor_command as doctor
from paceline_plugins.forecast.plan_command.command import plan
from paceline_plugins.receipts.verify_command.command import EPILOG as VERIFY_EPILOG
from paceline_plugins.receipts.verify_command.command import VerifyCommand, verify
from paceline_plugins.report import report_command as report
from paceline_plugins.report import trace_command as trace
from paceline_plugins.search import command_search as search
from paceline_plugins.sites import join_command as join
from paceline_plugins.sites import relay_command as relay
from paceline_plugins.sites import revoke_command as revoke

app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="Give the training program you already have a cluster.",
    no_args_is_help=True,
    context_settings={"auto_envvar_prefix": "PACELINE"},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("run", cls=ProgramCommand, context_settings=CONTEXT, epilog=EPILOG)(run)
app.command("join", cls=join.JoinCommand, context_settings=CONTEXT)(join.command)
app.command("relay")(relay.command)
app.command("blocks", cls=ProgramCommand, context_settings=CONTEXT)(blocks)
app.command("sim", cls=ProgramCommand, context_settings=CONTEXT)(sim.command)
app.command("watch")(watch.command)
app.command("report")(report.command)
app.command("trace")(trace.command)
app.command("tune", cls=search.TuneOrSearch, epilog=search.EPILOG)(tune)
app.command("explain")(explain.command)
app.command("plan", cls=ProgramCommand, context_settings=CONTEXT)(plan)
app.command("doctor")(doctor.command)
app.command("revoke")(revoke.command)
app.command("verify", cls=VerifyCommand, context_settings=CONTEXT, epilog=VERIFY_EPILOG)(verify)
app.command("settings")(settings.command)
app.add_typer(data.app, name="data")

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
    with refusing():
        found = settings_file.load(Path.cwd(), settings_file.commands(ctx))
    ctx.obj = found
    if found is not None:
        ctx.default_map = dict(found.values)
