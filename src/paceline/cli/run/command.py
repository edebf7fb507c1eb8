# SPDX-License-Identifier: Apache-2.0
"""`paceline run`: a program on N workers of this host, or of several hosts."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live as Screen

from paceline.cli.console import out, refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.prestart import begun
from paceline.cli.program_options import AsIs, ForceZeroLines, RandomData
from paceline.cli.run import certificates as doors
from paceline.cli.run import checks, dry_run, elastic_checks, failure, zero_lines
from paceline.cli.run import elastic as elastic_run
from paceline.cli.run import hosts as host_options
from paceline.cli.run import output as lines
from paceline.cli.run.conclusion import conclude, failed
from paceline.cli.run.disk_full import Room
from paceline.cli.run.status import RunStatus
from paceline.observe.reports.live import Live

if TYPE_CHECKING:
    from paceline.cli.launch.launch import Outcome
    from paceline.cli.launch.spawn import Command, WorkerProcess

EPILOG = (
    "Any other supervisor can start a worker of an elastic run as well: the program, without RANK and WORLD_SIZE, "
    "with PACELINE_CONTROL=HOST:PORT (where the control plane listens) and PACELINE_TLS=FOLDER (with cert.pem, key.pem "
    "and ca.pem of the job). A worker that ends with exit code 75 was given up by the others, and a fresh one may come."
)
CONTEXT: dict[str, Any] = {"allow_interspersed_args": False}  # what follows the script is its own


def command(
    ctx: typer.Context,
    script: Annotated[Path | None, typer.Argument(help="The training program.", show_default=False)] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[--] ARGS...", help="The program's own arguments."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of workers; with several hosts, on each host.", show_default="1"),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(help='Rule such as "bmuf(period=16)", for programs that name none.'),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help=f"Directory for the logs; by default a new one in ./{checks.LOGS}."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run that the log directory holds.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which a worker that does not answer is lost.")] = 600.0,
    hosts: Annotated[
        int | None,
        typer.Option(help="Number of hosts; start this command on each.", show_default="1, or as Slurm says"),
    ] = None,
    host_index: Annotated[
        int | None,
        typer.Option(help="Which of the hosts this is, from 0; ranks follow it.", show_default="0, or as Slurm says"),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where the hosts meet: host 0's address and a free port of it."),
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(help="Folder of cert.pem, key.pem and ca.pem to use instead of certificates made for the job."),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(help="The job's secret: made by host 0, copied to the other hosts (or on a disk they share)."),
    ] = None,
    in_the_clear: Annotated[
        bool, typer.Option("--open", help="No certificates: the connections of asynchronous rules are in the clear.")
    ] = False,
    elastic: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Workers may come and go: fewest and most, of all hosts together."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --elastic: an address of this host by which others can join."),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Join the elastic run whose launcher listens there."),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(help="With --elastic: seconds after which stragglers are called to an exchange."),
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            metavar="LOG", help="Go on with the elastic run in that log directory, whose launcher was killed."
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="How often all workers are started again when one fails, to resume from a checkpoint.")
    ] = 0,
    as_is: AsIs = False,
    random_data: RandomData = False,
    force_zero_lines: ForceZeroLines = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Only the workers' output: no status, no closing words.")
    ] = False,
    print_only: Annotated[
        bool, typer.Option("--print", help="Say what would be started, here and on other hosts, and start nothing.")
    ] = False,
) -> None:
    """Run a training program on several workers."""
    if again is not None:
        checks.alone(ctx, "again", "quiet")
        raise typer.Exit(elastic_run.again(checks.existing(again), partial(shown, quiet=quiet), quiet))
    checks.fits(elastic is not None or join is not None, hosts or 1, restarts, listen, grace)
    if script is not None:
        checks.check_script(script)
    elif elastic is None or workers != 0:
        refuse("no program was given: paceline run [OPTIONS] PROGRAM [ARGUMENTS]")
    speaks = checks.check_rule(rule)
    wishes = zero_lines.ZeroLineOptions(as_is, force_zero_lines, random_data)
    doors.check(tls, job, in_the_clear)
    if elastic is not None or join is not None:
        zero_lines.refuse_elastic(script, wishes)
        if elastic is not None:
            host_options.one_launcher()
        asked = elastic_run.ElasticOptions(
            elastic, join, listen, 1 if workers is None else workers, rule, timeout, grace
        )
        what = [] if script is None else program(script, arguments or [])
        if print_only:
            return elastic_run.show(asked, what, environment, log, (tls, job, in_the_clear))
        raise typer.Exit(_elastic(asked, what, (log, overwrite), (tls, job, in_the_clear), quiet))
    assert script is not None
    cluster, found = host_options.cluster(host_options.HostOptions(workers, hosts, host_index, master), timeout)
    bare = zero_lines.serves(script, wishes, cluster.size)
    what = program(script, arguments or [], bare)
    log = log or host_options.logs(found)
    if print_only:
        place = dry_run.directory(log)
        added = environment(cluster, rule, place) | dry_run.environment(cluster, tls, in_the_clear, place)
        return dry_run.run(ctx, cluster, found, what, added | zero_lines.environment(cluster, bare, random_data), place)
    checks.free_port(cluster)
    checks.crowd(cluster.workers, quiet)
    directory = checks.log_directory(log, cluster, overwrite)
    if in_the_clear and speaks and not quiet:
        doors.say_open()
    elif not in_the_clear and tls is None:
        tls = doors.for_workers(cluster, directory, job, speaks and not quiet)
    added = environment(cluster, rule, directory) | doors.environment(cluster, tls, in_the_clear)
    added |= zero_lines.environment(cluster, bare, random_data)
    started = time.monotonic()
    outcome = _run(cluster, what, added, directory, quiet, restarts, bare)
    code = conclude(outcome, cluster, directory, time.monotonic() - started, quiet)
    if code == 0 and zero_lines.all_alone(directory, wishes, arguments, cluster.size, rule):
        code = 1
    if outcome.stuck:  # a thread waits inside torch and cannot be interrupted
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def _elastic(
    asked: elastic_run.ElasticOptions,
    what: list[str],
    logs: tuple[Path | None, bool],
    door: tuple[Path | None, Path | None, bool],
    quiet: bool,
) -> int:
    """An elastic run, of the command `what`; the exit code."""
    place = asked.place()
    elastic_run.check_secret(asked, door)
    if logs[0] is not None:
        elastic_checks.vacant(logs[0], logs[1])
    cluster = LaunchCluster(max(1, asked.workers), timeout_s=asked.timeout_s)
    directory = checks.log_directory(logs[0], cluster, logs[1])
    tls = elastic_run.certificates(asked, directory, *door, quiet)
    added = environment(cluster, asked.rule, directory)
    return elastic_run.begin(asked, place, what, added, tls, directory, partial(shown, quiet=quiet), quiet)


def environment(cluster: LaunchCluster, rule: str | None, directory: Path) -> dict[str, str]:
    """What the workers' environment has that the launcher's has not."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    added = {
        "PACELINE_LOG": str(directory),
        "PACELINE_RUN": secrets.token_hex(8),
        "PACELINE_TIMEOUT_S": f"{cluster.timeout_s:g}",
        "PYTHONUNBUFFERED": "1",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // cluster.workers))
    return added | ({} if rule is None else {"PACELINE_RULE": rule, "PACELINE_RULE_ASKED": "1"})


def _run(
    cluster: LaunchCluster,
    arguments: list[str],
    added: dict[str, str],
    directory: Path,
    quiet: bool,
    restarts: int,
    first_alone: bool,
) -> Outcome:
    from paceline.cli.launch.spawn import Command
    from paceline.cli.run.restarts import started_again

    output = directory / "output"
    output.mkdir(exist_ok=True)
    what = Command(arguments, added, output, partial(failure.may_lose, directory))
    with shown(directory, cluster.workers * cluster.hosts, quiet, first_alone) as show:
        return started_again(restarts, what, lambda command: follow(cluster, command, show), failed)


def program(script: Path, arguments: list[str], bare: bool = False) -> list[str]:
    """The command that runs the user's program; with zero lines around it, where it is `bare`."""
    own = arguments[1:] if arguments[:1] == ["--"] else arguments
    return [sys.executable, "-u", *(("-m", "paceline.zero") if bare else ()), str(script), *own]


@contextlib.contextmanager
def shown(directory: Path, workers: int, quiet: bool, first_alone: bool = False) -> Iterator[lines.Show]:
    """How the lines of the workers are shown, with a status line below them where that is a terminal.

    `first_alone`: only those of rank 0, as the program prints them.
    """
    console = out()
    if not console.is_terminal:
        yield lines.first if first_alone else lines.plain
        return
    show = lines.first_on_terminal(console) if first_alone else lines.on_terminal(console)
    if quiet:
        yield show
    else:
        status = RunStatus(Live(directory), workers)
        with Screen(status, console=console, transient=True, refresh_per_second=4):
            yield show


def follow(cluster: LaunchCluster, what: Command, show: lines.Show) -> Outcome:
    """Launch, and show all that the workers print, to the last line."""
    tails, room = lines.Tails(show), Room(what.output.parent)

    told: set[int] = set()

    def look(workers: list[WorkerProcess], stopping: bool, lost: dict[int, int]) -> None:
        tails.mute_errors = stopping  # N tracebacks of KeyboardInterrupt say nothing new
        for worker in workers[len(tails) :]:
            tails.follow(worker.rank, worker.stdout, worker.stderr)
        tails.read()
        room.look()
        for rank in sorted(lost.keys() - told):
            told.add(rank)
            show(rank, f"this worker is lost: {failure.how_text(lost[rank])}; the others go on without it", True)

    with begun(cluster, what) as early:
        from paceline.cli.launch.launch import (
            launch,  # here, because torch loads for seconds: the workers load it at the same time
        )

        outcome = launch(cluster, what, look, early)
    look(outcome.workers, outcome.stopped_by is not None, outcome.lost)
    tails.finish()
    return outcome
