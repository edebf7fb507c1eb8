# SPDX-License-Identifier: Apache-2.0
"""`paceline run`: a program on N workers of this host, or of several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.console import refuse
from paceline.cli.console.program_options import Arguments, ProgramCommand, with_records
from paceline.cli.run import checks, fixed
from paceline.cli.run.conclusion import take_ending_file
from paceline.cli.run.hosts import chosen_transport, mpi_process
from paceline.cli.run.options import SHOWN, RunOptions
from paceline.cli.run.program import find
from paceline.extensions import LAUNCHERS, extension

HELP_ALL = "paceline.help_all"
EPILOG = (
    "Any other supervisor can start a worker of an elastic run as well: the program, without RANK and WORLD_SIZE, "
    "with PACELINE_CONTROL=HOST:PORT (where the control plane listens) and PACELINE_TLS=FOLDER (with cert.pem, key.pem "
    "and ca.pem of the job). A worker that ends with exit code 75 was declared lost, and a new one may start; with 85, "
    "as a launcher, it has left in order."
)

HELP = {"help_option_names": ["--help", "--help-all"]}
"""For the context of the command."""


class RunCommand(ProgramCommand):
    """Its `--help` shows the options that most runs need, and `--help-all` the others as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See :class:`ProgramCommand`."""
        ctx.meta[HELP_ALL] = "--help-all" in args
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments and options."""
        every = self.params
        self.params = [one for one in every if ctx.meta[HELP_ALL] or one.name in (*SHOWN, "script", "arguments")]
        super().format_options(ctx, formatter)
        self.params = every

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """What follows the options."""
        if ctx.meta[HELP_ALL]:
            super().format_epilog(ctx, formatter)
        else:
            formatter.write_paragraph()
            formatter.write_text("--help-all shows all options.")


@with_records
def run(
    ctx: typer.Context,
    options: RunOptions,
    script: Annotated[
        Path | None,
        typer.Argument(
            help="The training program: Python, any executable, or with -m a module of Python.", show_default=False
        ),
    ] = None,
    arguments: Arguments = None,
) -> None:
    """Run a training program on several workers.

    The program is Python, or any executable (ELF, or a script with #!), which attaches by paceline's C library.
    """
    ending, elastic = take_ending_file(), options.elastic
    if elastic.again is not None:
        checks.refuse_other_options(ctx, "again", "quiet")
        raise typer.Exit(
            extension(LAUNCHERS, "elastic").resume_run(checks.existing_directory(elastic.again), options.start.quiet)
        )
    options.check()
    program = None if script is None else find(script, arguments, options.program.module)
    if program is None and (elastic.elastic is None or options.hosts.workers != 0):
        refuse("no program was given: paceline run [OPTIONS] PROGRAM [ARGUMENTS]")
    options.tracking.check(program)
    options.security.check()
    if program is not None and options.hosts.named:
        raise typer.Exit(extension(LAUNCHERS, "ssh").run(ctx, program, options))
    if elastic.given:
        raise typer.Exit(extension(LAUNCHERS, "elastic").run(program, options))
    assert program is not None
    worker = mpi_process(options.hosts)
    transport = chosen_transport(options.start.transport, worker)
    if worker is not None:
        raise typer.Exit(extension(LAUNCHERS, "mpi").run(worker, program, options))
    fixed.run(ctx, program, options, transport, ending)
