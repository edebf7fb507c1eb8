# SPDX-License-Identifier: Apache-2.0
"""`paceline run --print`: what would be started, and nothing is."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import typer

from paceline.cli.console import near
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.saved_plan import address_text
from paceline.cli.run import certificates as doors
from paceline.cli.run import checks
from paceline.communication.schedulers import Hosts

FREE = "(a free port)"
JOB = "job.pem"
TO_CHANGE = ("host_index", "job", "print_only")
"""Options that are another host's own."""


def directory(asked: Path | None) -> Path:
    """The log directory that the run would have."""
    return (checks.fresh(checks.LOGS) if asked is None else asked).absolute()


def certificate(place: Path, cluster: LaunchCluster, joinable: bool = False) -> Path | None:
    """Where the certificate would be that `paceline run` makes for this host; None where it would make none."""
    if os.environ.get("PACELINE_TLS") or (cluster.size == 1 and not joinable):
        return None
    return place / "door" / f"host-{cluster.host_index}"


def run(
    ctx: typer.Context,
    cluster: LaunchCluster,
    found: Hosts | None,
    command: list[str],
    added: dict[str, str],
    place: Path,
) -> None:
    """Print the workers of this host, and what to type on the others.

    Args:
        ctx: of the command, whose options the other hosts take over.
        cluster: the shape of the run.
        found: who said what the options did not, if anybody.
        command: that every worker runs.
        added: to every worker's environment.
        place: the log directory.
    """
    several = cluster.master is not None
    meet = f"; the hosts meet at {address_text(*cluster.master)}" if cluster.master is not None else ""
    says = "" if found is None else f" ({found.says})"
    print(f"host {cluster.host_index} of {cluster.hosts}{says}, {cluster.workers} of {cluster.size} workers{meet}")
    print(f"logs: {near(place)}")
    master = ("127.0.0.1", FREE) if cluster.master is None else (cluster.master[0], str(cluster.master[1]))
    for local in range(cluster.workers):
        rank = cluster.host_index * cluster.workers + local
        _worker(f"worker {rank}", command, cluster.coordinates(local, rank, cluster.size, master) | added)
    if several and found is not None and found.count is not None:
        print(f"\n{found.says} starts the same command on the other hosts")
    elif several and found is not None:
        print("\nthe other pods run the same command")
    elif several:
        _others(ctx, cluster, place, _needs_secret(ctx, added, place))


def elastic(
    leads: bool, where: str, workers: int, command: list[str], added: dict[str, str], place: Path, secret: str
) -> None:
    """Print the workers of this host in an elastic run, and what to type on the others.

    Args:
        leads: whether this launcher hosts the control plane.
        where: the control plane's address.
        workers: of this host.
        command: that every worker runs.
        added: to every worker's environment.
        place: the log directory.
        secret: the option by which another host shows that it belongs to the job.
    """
    print(f"{'the control plane would listen' if leads else 'the control plane listens'} at {where}")
    print(f"logs: {near(place)}")
    for local in range(workers):
        _worker(f"worker {local} of this host", command, added | {"LOCAL_RANK": str(local), "PACELINE_CONTROL": where})
    if leads:
        print(f"\non other hosts:\n  paceline run --join {where} {secret} --workers N {shlex.join(command[2:])}")


def _worker(name: str, command: list[str], added: dict[str, str]) -> None:
    print(f"\n{name}\n  {shlex.join(command)}")
    for variable in sorted(added):
        print(f"  {variable}={added[variable]}")


def _needs_secret(ctx: typer.Context, added: dict[str, str], place: Path) -> bool:
    """Whether the other hosts need the job's file, which host 0 is about to make."""
    made = added.get("PACELINE_TLS", "").startswith(str(place))
    return made and (ctx.params["job"] is not None or ctx.params["host_index"] in (None, 0))


def _others(ctx: typer.Context, cluster: LaunchCluster, place: Path, secret: bool) -> None:
    print("\non the other hosts:")
    if secret and ctx.params["job"] is None:
        print(f"  first, once host 0 has begun, there: scp {near(place / 'door' / JOB)} HOST:{JOB}")
    for index in range(cluster.hosts):
        if index != cluster.host_index:
            print(f"  {shlex.join(['paceline', 'run', *_again(ctx, index, secret)])}")


def _again(ctx: typer.Context, index: int, secret: bool) -> list[str]:
    """The arguments of this command on host `index`."""
    words: list[str] = []
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        if option.param_type_name != "option" or option.name in TO_CHANGE or source is None:
            continue
        if source.name == "COMMANDLINE":
            value = ctx.params[option.name or ""]
            words += [option.opts[0]] if value is True else [option.opts[0], f"{value}"]
    words += ["--host-index", str(index)]
    if secret:
        words += ["--job", str(ctx.params["job"] or JOB)]
    return [*words, str(ctx.params["script"]), *(ctx.params["arguments"] or [])]


def environment(cluster: LaunchCluster, tls: Path | None, in_the_clear: bool, place: Path) -> dict[str, str]:
    """What the door adds to the workers' environment, with the certificate that would be made."""
    if not in_the_clear and tls is None:
        tls = certificate(place, cluster)
    return doors.environment(cluster, tls, in_the_clear)
