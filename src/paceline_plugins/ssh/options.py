# SPDX-License-Identifier: Apache-2.0
"""The options of `paceline run` about named hosts, and from them to the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.console import refuse, settings_file
from paceline.cli.run import checks, elastic_checks
from paceline.cli.run.certificates import Security
from paceline.cli.run.hosts import HostOptions
from paceline.cli.run.program import Program
from paceline.errors import PacelineError
from paceline_plugins.ssh import client, hosts, words
from paceline_plugins.ssh.program_files import collect

Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="N|a,b,...",
        help="Hosts to start over ssh: a,b,c, user@a:2222, @FILE, slurm, or all of paceline.toml. Or their number: "
        "then start this command on each.",
        show_default="1, or as Slurm says",
    ),
]
Bring = Annotated[
    bool,
    typer.Option(
        "--bring/--no-bring", help="With names of hosts: copy the program's folder to hosts that lack it or differ."
    ),
]


def count(text: str | None) -> int | None:
    """The number of hosts, where `--hosts` is one."""
    return None if text is None or hosts.are_names(text) else int(text)


def run(
    ctx: typer.Context,
    program: Program,
    asked: HostOptions,
    security: Security,
    timeout_s: float,
    rank_0_only: bool,
) -> int:
    """Run on named hosts; the exit code.

    Args:
        ctx: of the command; its further options go to every host.
        program: what the workers run.
        asked: the options about hosts, without their names.
        security: the options about certificates.
        timeout_s: of `--timeout`.
        rank_0_only: whether only rank 0's output is shown.
    """
    given = ctx.params
    _refuse_options_of_one_host(given)
    typed = ctx.get_parameter_source("workers")
    found = _hosts(ctx, asked.workers, typed is not None and typed.name == "COMMANDLINE")
    elastic = _elastic(given, sum(host.workers or 1 for host in found))
    if asked.workers is not None and asked.workers < 1:
        refuse(f"--workers must be at least 1, got {asked.workers}")
    if not timeout_s >= 1:
        refuse(f"--timeout must be at least 1 second, got {timeout_s}")
    master = None if asked.master is None else checks.host_and_port("--master", asked.master)
    secret = not security.in_the_clear and security.tls is None and sum(host.workers or 1 for host in found) > 1
    files, options = collect(program, Path.cwd()), words.same_on_all(ctx)
    files = replace(files, words=(*files.words, *program.arguments))
    if given["print_only"]:
        checks.check_rule(given["rule"], bool(elastic))
        print(words.shown(found, options, files, master, secret, elastic))
        return 0
    if not client.installed():
        refuse("--hosts with names needs OpenSSH's client, and there is no ssh on PATH: install it (openssh-client)")
    from paceline_plugins.ssh import launch  # here, because --print and refusals need none of it

    job = launch.Job(
        found, files, options, elastic, given["rule"], master, timeout_s, given["bring"], rank_0_only, secret,
        given["quiet"],
    )  # fmt: skip
    return launch.run(job, given["log"], given["overwrite"])


def _elastic(given: Mapping[str, Any], workers: int) -> list[str]:
    """The options of an elastic run for its first host; empty for other runs."""
    if given["elastic"] is None:
        return []
    _, most = elastic_checks.bounds(given["elastic"])
    if workers > most:
        refuse(f"the hosts start {workers} workers, and --elastic {given['elastic']} allows {most}: raise the latter")
    elastic_checks.seconds(given["timeout"], given["grace"])
    grace = [] if given["grace"] is None else ["--grace", f"{given['grace']:g}"]
    return ["--elastic", given["elastic"], *grace]


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
