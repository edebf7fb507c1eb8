# SPDX-License-Identifier: Apache-2.0
"""The options of `paceline run` about named hosts, and from them to the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from paceline.cli.console import refuse, settings_file
from paceline.cli.run import checks
from paceline.cli.run.options import RunOptions
from paceline.cli.run.program import Program, starter
from paceline.errors import PacelineError
from paceline.extensions import LAUNCHERS, extension
from paceline_plugins.ssh import client, hosts, words
from paceline_plugins.ssh.program_files import collect


def run(ctx: typer.Context, program: Program, asked: RunOptions) -> int:
    """Run on named hosts; the exit code.

    Args:
        ctx: of the command; its further options go to every host.
        program: what the workers run.
        asked: the options of the command.
    """
    start, security = asked.start, asked.security
    rank_0_only = False
    if asked.elastic.given:
        starter().refuse_elastic(program, asked.program)
    else:
        rank_0_only = starter().serves(program, asked.program, 2)
    _refuse_options_of_one_host(ctx.params)
    typed = ctx.get_parameter_source("workers")
    found = _hosts(ctx, asked.hosts.workers, typed is not None and typed.name == "COMMANDLINE")
    elastic = _elastic(asked, sum(host.workers or 1 for host in found))
    if asked.hosts.workers is not None and asked.hosts.workers < 1:
        refuse(f"--workers must be at least 1, got {asked.hosts.workers}")
    if not start.timeout >= 1:
        refuse(f"--timeout must be at least 1 second, got {start.timeout}")
    master = None if asked.hosts.master is None else checks.host_and_port("--master", asked.hosts.master)
    secret = not security.in_the_clear and security.tls is None and sum(host.workers or 1 for host in found) > 1
    files, options = collect(program, Path.cwd()), words.same_on_all(ctx)
    files = replace(files, words=(*files.words, *program.arguments))
    if start.print_only:
        checks.check_rule(start.rule, bool(elastic))
        print(words.shown(found, options, files, master, secret, elastic))
        return 0
    if not client.installed():
        refuse("--hosts with names needs OpenSSH's client, and there is no ssh on PATH: install it (openssh-client)")
    from paceline_plugins.ssh import launch  # here, because --print and refusals need none of it

    job = launch.Job(found, files, options, elastic, start, master, rank_0_only, secret)
    return launch.run(job)


def _elastic(asked: RunOptions, workers: int) -> list[str]:
    """The options of an elastic run for its first host; empty for other runs."""
    bounds, grace_s = asked.elastic.elastic, asked.elastic.grace
    if bounds is None:
        return []
    _, most = extension(LAUNCHERS, "elastic").elastic_checks.bounds(bounds)
    if workers > most:
        refuse(f"the hosts start {workers} workers, and --elastic {bounds} allows {most}: raise the latter")
    extension(LAUNCHERS, "elastic").elastic_checks.seconds(asked.start.timeout, grace_s)
    return ["--elastic", bounds, *([] if grace_s is None else ["--grace", f"{grace_s:g}"])]


def _hosts(ctx: typer.Context, workers: int | None, typed: bool) -> list[hosts.Host]:
    """The hosts, each with its number of workers: typed, else its own, else that of the settings, else 1."""
    settings = ctx.find_object(settings_file.SettingsFile)
    tables: Mapping[str, Any] = {} if settings is None else settings.hosts
    try:
        found = hosts.read(ctx.params["hosts"], tables, os.environ)
    except PacelineError as error:
        refuse(str(error))
    return [replace(host, workers=workers if typed else host.workers or workers or 1) for host in found]


def _refuse_options_of_one_host(given: Mapping[str, Any]) -> None:
    """Refuse options that make no sense where one command starts all hosts."""
    if given["host_index"] is not None:
        refuse("--host-index is for a command that is typed on each host; with names of hosts, type it on one alone")
    if given["job"] is not None:
        refuse("--job: with names of hosts the job's secret goes to them over ssh; leave it out")
    for name in ("join", "listen", "public", "relay"):
        if given[name] is not None:
            refuse(f"--{name}: with names of hosts the first one listens for the other ones; leave it out")
    if given["invite"]:
        refuse("--invite is for sites without ssh to each other; with names of hosts leave it out")
    if given["transport"] == "mpi":
        refuse("--transport mpi: mpiexec starts its workers itself; leave --hosts out, and name the hosts to mpiexec")
