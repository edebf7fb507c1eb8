# SPDX-License-Identifier: Apache-2.0
"""`paceline run`: a program on N workers of this host, or of several hosts."""

from __future__ import annotations

import os
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live as Screen
from rich.text import Text

from paceline.errors import PacelineError
from paceline.observe.live import Live
from paceline.observe.read import has_run
from paceline.observe.summary import seconds_text

from . import checks, doors, failure, lines
from .cluster import Cluster
from .console import err, error_panel, near, out
from .status import Status

if TYPE_CHECKING:
    from .launch import Outcome
    from .workers import Command, Worker

CONTEXT: dict[str, Any] = {"allow_interspersed_args": False}  # what follows the script is its own


def command(
    script: Annotated[Path, typer.Argument(help="The training program.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[--] ARGS...", help="The program's own arguments."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Number of workers; with several hosts, on each host.")] = 1,
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
    hosts: Annotated[int, typer.Option(help="Number of hosts; start this command on each.")] = 1,
    host_index: Annotated[int, typer.Option(help="Which of the hosts this is, from 0; ranks follow it.")] = 0,
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
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Only the workers' output: no status, no closing words.")
    ] = False,
) -> None:
    """Run a training program on several workers."""
    cluster = checks.cluster(workers, hosts, host_index, master, timeout)
    checks.check_script(script)
    speaks = checks.check_rule(rule)
    doors.check(tls, job, in_the_clear)
    directory = checks.log_directory(log, cluster, overwrite)
    if in_the_clear and speaks and not quiet:
        doors.say_open()
    elif not in_the_clear and tls is None:
        tls = doors.for_workers(cluster, directory, job, speaks and not quiet)
    added = environment(cluster, rule, directory) | doors.environment(cluster, tls, in_the_clear)
    started = time.monotonic()
    outcome = _run(cluster, script, arguments or [], added, directory, quiet)
    code = _conclude(outcome, cluster, directory, time.monotonic() - started, quiet)
    if outcome.stuck:  # a thread waits inside torch and cannot be interrupted
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def environment(cluster: Cluster, rule: str | None, directory: Path) -> dict[str, str]:
    """What the workers' environment has that the launcher's has not."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    added = {
        "PACELINE_LOG": str(directory),
        "PACELINE_TIMEOUT_S": f"{cluster.timeout_s:g}",
        "PYTHONUNBUFFERED": "1",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // cluster.workers))
    return added | ({} if rule is None else {"PACELINE_RULE": rule})


def _run(
    cluster: Cluster,
    script: Path,
    arguments: list[str],
    added: dict[str, str],
    directory: Path,
    quiet: bool,
) -> Outcome:
    from .workers import Command  # here, because torch loads for seconds and --help must not wait

    own = arguments[1:] if arguments[:1] == ["--"] else arguments
    output = directory / "output"
    output.mkdir(exist_ok=True)
    what = Command([sys.executable, "-u", str(script), *own], added, output, partial(failure.may_lose, directory))
    console = out()
    if not console.is_terminal:
        return _follow(cluster, what, lines.plain)
    if quiet:
        return _follow(cluster, what, lines.on_terminal(console))
    status = Status(Live(directory), cluster.workers * cluster.hosts)
    with Screen(status, console=console, transient=True, refresh_per_second=4):
        return _follow(cluster, what, lines.on_terminal(console))


def _follow(cluster: Cluster, what: Command, show: lines.Show) -> Outcome:
    """Launch, and show all that the workers print, to the last line."""
    from .launch import launch

    tails = lines.Tails(show)

    told: set[int] = set()

    def look(workers: list[Worker], stopping: bool, lost: dict[int, int]) -> None:
        tails.mute_errors = stopping  # N tracebacks of KeyboardInterrupt say nothing new
        for worker in workers[len(tails) :]:
            tails.follow(worker.rank, worker.stdout, worker.stderr)
        tails.read()
        for rank in sorted(lost.keys() - told):
            told.add(rank)
            show(rank, f"this worker is lost: {failure.how_text(lost[rank])}; the others go on without it", True)

    outcome = launch(cluster, what, look)
    look(outcome.workers, outcome.stopped_by is not None, outcome.lost)
    tails.finish()
    return outcome


def _conclude(outcome: Outcome, cluster: Cluster, directory: Path, seconds: float, quiet: bool) -> int:
    """Say how it ended; the exit code."""
    console = err()
    if outcome.codes:
        code = _failed(outcome)
    elif outcome.stopped_by is not None:
        console.print(f"stopped by {failure.signal_name(outcome.stopped_by)}: no worker is left")
        code = 128 + outcome.stopped_by
    elif outcome.error is not None:
        if outcome.workers:
            _ended_elsewhere(outcome.error)
        else:
            _not_started(outcome.error, cluster)
        code = 1
    elif outcome.lost:
        code = _finished_without(outcome, seconds)
    else:
        code = 0
        if not quiet:
            count = len(outcome.workers)
            plural = "s" if count > 1 else ""
            console.print(f"{count} worker{plural} finished after {seconds_text(seconds)}")
    if not quiet:
        _point_at(directory)
    return code


def _failed(outcome: Outcome) -> int:
    files = {worker.rank: worker.stderr for worker in outcome.workers}
    rank = failure.culprit(outcome.codes, files)
    code = outcome.codes[rank]
    err().print(failure.panel(rank, code, files[rank], len(outcome.workers) - 1))
    return failure.exit_code(code)


def _finished_without(outcome: Outcome, seconds: float) -> int:
    """Some were lost on the way; the exit code says so."""
    count, files = len(outcome.workers) - len(outcome.lost), {worker.rank: worker.stderr for worker in outcome.workers}
    for rank, code in sorted(outcome.lost.items()):
        err().print(failure.panel(rank, code, files[rank], 0, "was lost; the others went on without it"))
    names = ", ".join(str(rank) for rank in sorted(outcome.lost))
    plural = "s" if count != 1 else ""
    err().print(f"{count} worker{plural} finished here after {seconds_text(seconds)}, without {names}")
    return failure.LOST


def _ended_elsewhere(error: BaseException) -> None:
    """The workers were fine, but could not go on."""
    hint = "the workers of this host were stopped; the launcher over there says more"
    if not isinstance(error, PacelineError):
        hint = f"the workers of this host were stopped ({type(error).__name__})"
    parts = (Text(str(error), style="bold red"), Text(hint, style="default"))
    err().print(error_panel("the run ended", *parts))


def _not_started(error: BaseException, cluster: Cluster) -> None:
    cause = f"{type(error).__name__}: {error}"
    if cluster.master is None:
        err().print(error_panel("no worker was started", Text(cause, style="bold red")))
        return
    where = f"{cluster.master[0]}:{cluster.master[1]}"
    says = f"the {cluster.hosts} hosts did not meet at {where} within {cluster.timeout_s:g} s"
    hint = (
        f"start the same command on each host, with --host-index 0 to {cluster.hosts - 1}, and "
        "check that all of them can reach that address"
    )
    parts = (Text(says, style="bold red"), Text(cause, style="dim"), Text(hint, style="default"))
    err().print(error_panel(f"host {cluster.host_index} started no worker", *parts))


def _point_at(directory: Path) -> None:
    shown = near(directory)
    if has_run(directory):
        err().print(f"logs: {shown}; see them with: paceline report {shlex.quote(shown)}")
    else:
        err().print(f"the workers' output: {os.path.join(shown, 'output')}")
