# SPDX-License-Identifier: Apache-2.0
"""`paceline join`: take part in an elastic run of another host, wherever it is, with one line from there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.console import command_app, refuse
from paceline.cli.console.program_options import (
    CONTEXT,
    Arguments,
    Log,
    Module,
    ProgramCommand,
    Quiet,
)
from paceline.cli.run.options import ElasticOptions, ProgramOptions, Security, StartOptions
from paceline.cli.run.program import find, starter
from paceline_plugins.sites import sites
from paceline_plugins.sites.elastic_run import ElasticRun, start_run
from paceline_plugins.sites.sites import Sites

TIMEOUT_S = 600.0
MOST_TEXT = 2000


class JoinCommand(ProgramCommand):
    """Options may stand before the invitation, or between it and the program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the invitation behind the options that follow it."""
        if args and (args[0] == "-" or not args[0].startswith("-")):
            invitation, *rest = args
            place = self._options(ctx, rest)
            args = [*rest[:place], invitation, *rest[place:]]
        return super().parse_args(ctx, args)

    def _options(self, ctx: Any, rest: list[str]) -> int:
        """How many words in front are options of ours and their values."""
        takes = {name: not getattr(one, "is_flag", False) for one in self.get_params(ctx) for name in one.opts}
        place = 0
        while place < len(rest) and rest[place].startswith("-") and rest[place] != "--":
            name, equals, _ = rest[place].partition("=")
            place += 2 if takes.get(name, False) and not equals else 1
        return min(place, len(rest))


def command(
    ctx: typer.Context,
    invitation: Annotated[
        str,
        typer.Argument(
            metavar="INVITATION",
            help="A file with the line that `paceline run --invite` or `paceline relay` printed; - asks for it.",
            show_default=False,
        ),
    ],
    script: Annotated[
        Path | None, typer.Argument(help="The training program, the same as on the first host.", show_default=False)
    ] = None,
    arguments: Arguments = None,
    workers: Annotated[int, typer.Option(help="Number of workers of this host.")] = 1,
    log: Log = None,
    module: Module = False,
    quiet: Quiet = False,
) -> None:
    """Join the elastic run of another host.

    This host needs no open port: it dials out to the address in the invitation, gets certificates for its workers
    there, and reaches workers of other sites through the relay. The same program and data must be here.
    """
    if script is None:
        refuse("no program was given: paceline join [OPTIONS] FILE|- PROGRAM [ARGUMENTS]")
    read = sites.read(invitation, "INVITATION", lead=False)
    program = find(script, arguments, module)
    options = ProgramOptions(module=module)
    starter().refuse_elastic(program, options)
    if workers < 1:
        refuse(f"--workers must be at least 1, got {workers}")
    enrolled = sites.enrol(read, "INVITATION", workers)
    rule, timeout_s = _of_run(enrolled.run)
    start = StartOptions(rule=rule, timeout=timeout_s, log=log, quiet=quiet)
    asked = ElasticRun(ElasticOptions(join=read.where), start, workers, Sites(enrolled=enrolled))
    raise typer.Exit(start_run(asked, program, options, Security()))


def _of_run(facts: dict[str, Any]) -> tuple[str | None, float]:
    """Rule and timeout, as on the first host."""
    rule, seconds = facts.get("rule"), facts.get("timeout_s")
    known = isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds >= 1
    return (
        rule if isinstance(rule, str) and len(rule) <= MOST_TEXT else None,
        float(seconds) if known and seconds is not None else TIMEOUT_S,
    )


app = command_app(command, cls=JoinCommand, context_settings=CONTEXT)
