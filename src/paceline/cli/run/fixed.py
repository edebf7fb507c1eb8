# SPDX-License-Identifier: Apache-2.0
"""The workers of a run of a fixed size, on this host or on several: their environment, start and end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from paceline.cli.console import err, settings_file
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.spawn import Command
from paceline.cli.run import certificates, checks, dry_run, failure, start
from paceline.cli.run.conclusion import clear, conclude, failed, write_ending
from paceline.cli.run.hosts import job_log_directory, resolve_cluster
from paceline.cli.run.options import RunOptions, Security
from paceline.cli.run.program import Program, starter
from paceline.extensions import SEALS, extension

if TYPE_CHECKING:
    from paceline.cli.launch.launch import Outcome

SUCCESS_S = 3600.0
"""After so long without a failure the count of restarts begins at 0 again."""


def run(ctx: typer.Context, program: Program, options: RunOptions, transport: str, ending: Path | None) -> NoReturn:
    """Run the workers of this host to their end, and end the command with their exit code.

    Args:
        ctx: of the command, for `--print`.
        program: of every worker.
        options: of the command.
        transport: over which the workers exchange.
        ending: the file that gets their exit codes, or None.
    """
    asked = options.start
    cluster, scheduler = resolve_cluster(options.hosts, asked.timeout)
    bare = starter().serves(program, options.program, cluster.size)
    if bare:
        options.tracking.check_zero_lines(asked.restarts)
    command, log = program.command(bare), asked.log or job_log_directory(scheduler)
    variables = starter().environment(cluster, bare, options.program.random_data)
    variables |= start.transport_variable(transport) | options.tracking.environment()
    if asked.print_only:
        checks.check_rule(asked.rule, program=program)
        directory = dry_run.log_directory(log)
        added = start.environment(cluster, asked.rule, directory)
        added |= dry_run.environment(cluster, options.security, directory)
        dry_run.run(ctx, cluster, scheduler, command, added | variables, directory)
        raise typer.Exit
    checks.check_crowd(cluster.workers)
    announces = checks.check_rule(asked.rule, program=program) and not asked.quiet
    checks.free_port(cluster)
    options.tracking.check_ports(cluster.workers)
    directory = checks.log_directory(log, cluster, asked.overwrite)
    if not asked.quiet:
        what = f"starting {start.count(cluster)} of {program.name}{settings_file.named(ctx)}"
        err().print(what, markup=False, soft_wrap=True)
    with starter().fork_server(start.loaded(cluster) | variables if bare else None) as forks:
        added = environment(cluster, asked.rule, directory, options.security, announces)
        sign = signing(cluster, directory, options.security, announces)
        seal = None
        if asked.receipts:
            seal = extension(SEALS, "receipts")(cluster, directory, sign, options.security.job)
            seal.begin(asked.quiet)
            added |= seal.environment
        started = time.monotonic()
        workers = Command(command, added | variables, directory / "output", sign, forks=forks)
        outcome = launch(cluster, workers, asked.quiet, asked.restarts, bare)
        write_ending(ending, outcome)
        code = conclude(outcome, cluster, directory, time.monotonic() - started, asked.quiet)
        if seal is not None:
            code = seal.seal(code, [worker.rank for worker in outcome.workers])
    if code == 0 and starter().work_not_shared(directory, options.program, program, cluster.size, asked.rule):
        code = 1
    leave(clear(directory, code, asked.quiet, cluster), outcome)


def environment(
    cluster: LaunchCluster, rule: str | None, directory: Path, security: Security, announces: bool
) -> dict[str, str]:
    """Variables that all workers get in addition to the launcher's own; `announces`: whether to warn of `--open`."""
    if security.in_the_clear and announces:
        certificates.warn_open()
    result = certificates.environment(cluster, security.tls, security.in_the_clear)
    return start.environment(cluster, rule, directory) | result


def signing(
    cluster: LaunchCluster, directory: Path, security: Security, announces: bool
) -> Callable[[int], Mapping[str, str]]:
    """Makes the certificate of a rank and names it, where the workers get one from this launcher."""
    own = security.in_the_clear or security.tls is not None
    host = None if own else certificates.for_workers(cluster, directory, security.job, announces)
    return host or (lambda rank: {})


def launch(
    cluster: LaunchCluster, command: Command, quiet: bool = False, restarts: int = 0, rank_0_only: bool = False
) -> Outcome:
    """Start the workers, show what they print, and wait for them; start all again after a failure, if asked to."""
    directory = command.output.parent
    command.output.mkdir(exist_ok=True)
    command = replace(command, may_lose=partial(failure.may_lose, directory))
    with start.shown(directory, cluster.size, quiet, rank_0_only) as show:
        return launch_with_restarts(restarts, command, lambda command: start.follow(cluster, command, show), failed)


def leave(code: int, outcome: Outcome) -> NoReturn:
    """End the command with the exit code."""
    if outcome.stuck:  # a thread waits inside torch and cannot be interrupted
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def launch_with_restarts(
    most: int,
    command: Command,
    launch: Callable[[Command], Outcome],
    report: Callable[[Outcome], object],
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Launch until the run succeeds, is stopped, or fails after `most` restarts; `report` prints each failure."""
    used, start = 0, command.start
    while True:
        began = clock()
        outcome = launch(replace(command, start=start))
        used = 0 if clock() - began > SUCCESS_S else used
        if not _failed(outcome) or used >= most:
            return outcome
        used, start = used + 1, start + 1
        if outcome.codes:
            report(outcome)
        else:
            err().print(f"the run ended: {outcome.error}", markup=False)
        err().print(f"starting all workers again ({used} of {most} restarts)", markup=False)


def _failed(outcome: Outcome) -> bool:
    """Whether a started worker failed, here or on another host."""
    return bool(outcome.codes) or (outcome.error is not None and bool(outcome.workers))
