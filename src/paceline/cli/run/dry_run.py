# SPDX-License-Identifier: Apache-2.0
"""`paceline run --print`: print the commands and variables of a run, and start nothing."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import typer

from paceline.cli.console import near, settings_file
from paceline.cli.launch.cluster import LaunchCluster, address_text
from paceline.cli.run import certificates, checks
from paceline.cli.run.certificates import JOB
from paceline.cli.run.options import Security
from paceline.communication.schedulers import Hosts

FREE = "(a free port)"
TO_CHANGE = ("host_index", "job", "module", "print_only")
"""Options that differ between hosts."""


def log_directory(asked: Path | None) -> Path:
    """The log directory that the run would use."""
    return (checks.new_directory(checks.LOGS) if asked is None else asked).absolute()


def run(
    ctx: typer.Context,
    cluster: LaunchCluster,
    scheduler: Hosts | None,
    command: list[str],
    added: dict[str, str],
    directory: Path,
) -> None:
    """Print the workers of this host, and the commands for the other hosts."""
    several = cluster.master is not None
    meet = f"; the hosts meet at {address_text(*cluster.master)}" if cluster.master is not None else ""
    says = "" if scheduler is None else f" ({scheduler.says})"
    print(f"host {cluster.host_index} of {cluster.hosts}{says}, {cluster.workers} of {cluster.size} workers{meet}")
    print(f"logs: {near(directory)}")
    master = ("127.0.0.1", FREE) if cluster.master is None else (cluster.master[0], str(cluster.master[1]))
    for local in range(cluster.workers):
        rank = cluster.host_index * cluster.workers + local
        own = dict(added)
        if own.get("PACELINE_TLS", "").startswith(str(directory)):  # the run makes one for each rank
            own["PACELINE_TLS"] += f"/rank-{rank}"
        worker(f"worker {rank}", command, cluster.coordinates(local, rank, cluster.size, master) | own)
    if several and scheduler is not None and scheduler.count is not None:
        print(f"\n{scheduler.says} starts the same command on the other hosts")
    elif several and scheduler is not None:
        print("\nthe other pods run the same command")
    elif several:
        _other_hosts(ctx, cluster, directory, _needs_secret(ctx, added, directory))


def worker(name: str, command: list[str], added: dict[str, str]) -> None:
    """Print a worker's command and variables."""
    print(f"\n{name}\n  {shlex.join(command)}")
    for variable in sorted(added):
        print(f"  {variable}={added[variable]}")


def _needs_secret(ctx: typer.Context, added: dict[str, str], directory: Path) -> bool:
    """Whether the other hosts need the job's file, which host 0 would make."""
    made = added.get("PACELINE_TLS", "").startswith(str(directory))
    return made and (ctx.params["job"] is not None or ctx.params["host_index"] in (None, 0))


def _other_hosts(ctx: typer.Context, cluster: LaunchCluster, directory: Path, secret: bool) -> None:
    print("\non the other hosts:")
    if secret and ctx.params["job"] is None:
        print(f"  first, once host 0 has started, there: scp {near(directory / 'certificates' / JOB)} HOST:{JOB}")
    for index in range(cluster.hosts):
        if index != cluster.host_index:
            print(f"  {shlex.join(['paceline', 'run', *_arguments(ctx, index, secret)])}")


def _arguments(ctx: typer.Context, index: int, secret: bool) -> list[str]:
    """The arguments of this command on host `index`."""
    words: list[str] = []
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        if option.param_type_name != "option" or option.name in TO_CHANGE or source is None:
            continue
        if source.name != "DEFAULT":  # also what a file sets, which the other hosts may not have
            words += settings_file.as_typed(option.opts[0], ctx.params[option.name or ""])
    words += ["--host-index", str(index)]
    if secret:
        words += ["--job", str(ctx.params["job"] or JOB)]
    module = ["-m"] if ctx.params["module"] else []
    return [*words, *module, str(ctx.params["script"]), *(ctx.params["arguments"] or [])]


def environment(cluster: LaunchCluster, security: Security, directory: Path) -> dict[str, str]:
    """The variables of `certificates.environment`, with the certificate that the run would make."""
    tls = security.tls
    if tls is None and not security.in_the_clear and not os.environ.get("PACELINE_TLS") and cluster.size > 1:
        tls = directory / "certificates" / f"host-{cluster.host_index}"
    return certificates.environment(cluster, tls, security.in_the_clear)
