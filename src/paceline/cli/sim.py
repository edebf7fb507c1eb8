# SPDX-License-Identifier: Apache-2.0
"""`paceline sim`: a program under N virtual workers in one process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paceline.cli.console import err, error_panel, near, refuse
from paceline.cli.console.program_options import Arguments, AsIs, Log, Overwrite, RandomData, RuleText, with_records
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import checks, failure, start
from paceline.cli.run.conclusion import clear, finished, point_at_logs, stopped
from paceline.cli.run.options import ProgramOptions
from paceline.cli.run.program import python_program, starter

if TYPE_CHECKING:
    from paceline.cli.launch.launch import Outcome

MOST = 4096
"""Virtual workers at most; each is a thread with a model of its own."""


@dataclass(frozen=True)
class SimOptions:
    """The options of `paceline sim`."""

    workers: Annotated[int, typer.Option(help="Number of virtual workers.")] = 4
    rule: RuleText = None
    hosts: Annotated[int, typer.Option(help="Number of simulated hosts, for rules that depend on it.")] = 1
    log: Log = None
    overwrite: Overwrite = False
    as_is: AsIs = False
    random_data: RandomData = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the first worker's output: no status, no summary.")] = (
        False
    )


@with_records
def command(
    script: Annotated[Path, typer.Argument(help="The training program.", show_default=False)],
    options: SimOptions,
    arguments: Arguments = None,
) -> None:
    """Run a training program under virtual workers, one at a time, in one process on one device.

    The results are those of as many real workers; the time is the sum of all their minibatches. The
    output of worker 0 appears here, that of the other workers in files beside the logs.
    """
    workers, hosts, rule = options.workers, options.hosts, options.rule
    if not 1 <= workers <= MOST:
        refuse(f"--workers must lie in 1..{MOST}, got {workers}")
    if not 1 <= hosts <= workers:
        refuse(f"--hosts must lie in 1..{workers} with --workers {workers}, got {hosts}")
    program = python_program(script, arguments, "sim runs Python programs inside one process")
    checks.check_rule(rule, program=program)
    about = ProgramOptions(options.as_is, options.random_data)
    bare = starter().serves(program, about, workers)
    lines = "as-is" if not bare else "random-data" if options.random_data else "zero"
    directory = checks.log_directory(options.log, LaunchCluster(workers), options.overwrite)
    outcome = _run((workers, hosts), [lines, *program.typed], rule, directory, options.quiet)
    code = _conclude(outcome, workers, directory, options.quiet)
    if code == 0 and starter().work_not_shared(directory, about, program, workers, rule):
        code = 1
    raise typer.Exit(clear(directory, code, options.quiet))


def _run(size: tuple[int, int], program: list[str], rule: str | None, directory: Path, quiet: bool) -> Outcome:
    """Run the simulation in one process, as a worker of `paceline run`.

    `size` has the numbers of workers and hosts; `program` the kind of zero lines, the script, its arguments.
    """
    from paceline.cli.launch.spawn import Command

    output = directory / "output"
    output.mkdir(exist_ok=True)
    for old in [*output.glob("rank-*.out"), *output.glob("rank-*.err"), output / FAILED]:
        old.unlink(missing_ok=True)
    arguments = [sys.executable, "-u", "-m", "paceline.forecast.sim.program", *map(str, size), str(output), *program]
    one_process = LaunchCluster(1)
    command = Command(arguments, start.environment(one_process, rule, directory), output)
    with start.shown(directory, size[0], quiet, rank_0_only=program[0] != "as-is") as show:
        return start.follow(one_process, command, show)


FAILED = "failed"  # of paceline.forecast.sim.program, which loads torch


def _conclude(outcome: Outcome, workers: int, directory: Path, quiet: bool) -> int:
    """Print how the simulation ended; the exit code."""
    console, code = err(), 0
    if outcome.codes:
        code = failure.exit_code(outcome.codes[0])
        _failed(outcome.codes[0], workers, directory / "output")
    elif outcome.stopped_by is not None:
        code = stopped(outcome.stopped_by)
    elif outcome.error is not None:
        cause = f"{type(outcome.error).__name__}: {outcome.error}"
        console.print(error_panel("the simulation was not started", Text(cause, style="bold red")))
        code = 1
    else:
        code = finished(directory, quiet, workers, outcome.messages, "virtual worker")
    if not quiet:
        point_at_logs(directory)
    return code


def _failed(code: int, workers: int, output: Path) -> None:
    """Print the panel of the worker that failed, or of the whole process if that crashed."""
    result = output / FAILED
    if result.is_file():
        rank = int(result.read_text(encoding="utf-8"))
        err().print(failure.panel(rank, code, output / f"rank-{rank:03d}.err", workers - 1))
        return
    stderr = output / "rank-000.err"
    words, tail = failure.error_lines(stderr, 0)
    parts = [Text(words or failure.exit_text(code), style="bold red")]
    if tail:
        parts.append(Text("\n".join(["", *tail, ""]), style="dim"))
    below = [failure.exit_text(code), failure.advice(code, words), f"all it wrote to stderr: {near(stderr)}"]
    parts.append(Text("\n".join(below)))
    err().print(error_panel("the simulation failed", *parts))
