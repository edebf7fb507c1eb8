# SPDX-License-Identifier: Apache-2.0
"""The workers of a run of a fixed size, on this host or on several: their environment, start and end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import certificates, failure, start
from paceline.cli.run.certificates import Security
from paceline.cli.run.conclusion import failed

if TYPE_CHECKING:
    from paceline.cli.launch.forks import ForkServer
    from paceline.cli.launch.launch import Outcome


def environment(
    cluster: LaunchCluster, rule: str | None, directory: Path, security: Security, announces: bool
) -> dict[str, str]:
    """Variables that all workers get in addition to the launcher's own.

    Args:
        cluster: the shape of the run.
        rule: for programs that name none, or None.
        directory: of the logs.
        security: the options about certificates.
        announces: whether the workers may open connections of their own, and the user wants to read about it.
    """
    if security.in_the_clear and announces:
        certificates.warn_open()
    found = certificates.environment(cluster, security.tls, security.in_the_clear)
    return start.environment(cluster, rule, directory) | found


def signing(
    cluster: LaunchCluster, directory: Path, security: Security, announces: bool
) -> Callable[[int], Mapping[str, str]]:
    """Makes the certificate of a rank and names it, where the workers get one from this launcher."""
    if security.in_the_clear or security.tls is not None:
        return _nothing
    host = certificates.for_workers(cluster, directory, security.job, announces)
    return _nothing if host is None else host


def _nothing(rank: int) -> Mapping[str, str]:
    return {}


def launch(
    cluster: LaunchCluster,
    arguments: list[str],
    added: dict[str, str],
    directory: Path,
    quiet: bool = False,
    restarts: int = 0,
    rank_0_only: bool = False,
    of_rank: Callable[[int], Mapping[str, str]] = _nothing,
    forks: ForkServer | None = None,
) -> Outcome:
    """Start the workers, show what they print, and wait for them; start all again after a failure, if asked to."""
    from paceline.cli.launch.spawn import Command
    from paceline.cli.run.restarts import launch_with_restarts

    output = directory / "output"
    output.mkdir(exist_ok=True)
    command = Command(arguments, added, output, of_rank, partial(failure.may_lose, directory), forks=forks)
    with start.shown(directory, cluster.size, quiet, rank_0_only) as show:
        return launch_with_restarts(restarts, command, lambda command: start.follow(cluster, command, show), failed)


def leave(code: int, outcome: Outcome) -> NoReturn:
    """End the command with the exit code."""
    if outcome.stuck:  # a thread waits inside torch and cannot be interrupted
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)
