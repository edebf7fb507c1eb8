# SPDX-License-Identifier: Apache-2.0
"""The checks of `paceline run` before anything starts."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import typer

from paceline.cli.console import refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import rule_check
from paceline.cli.run.program import Program
from paceline.observe.event_log import ATTACHED
from paceline.observe.reports.read import LOG_NAME

LOGS = "paceline-logs"
CROWDED_WORKERS, CROWDED_ELASTIC = 8, 64
"""Workers of a processor at most; in an elastic run, where some may wait for their turn."""


def cluster(workers: int, hosts: int, host_index: int, master: str | None, timeout_s: float) -> LaunchCluster:
    if workers < 1:
        refuse(f"--workers must be at least 1, got {workers}")
    if hosts < 1:
        refuse(f"--hosts must be at least 1, got {hosts}")
    if not 0 <= host_index < hosts:
        refuse(f"--host-index must lie in 0..{hosts - 1} with --hosts {hosts}, got {host_index}")
    if not timeout_s >= 1:
        refuse(f"--timeout must be at least 1 second, got {timeout_s}")
    if hosts > 1 and master is None:
        refuse(f"--hosts {hosts} needs --master HOST:PORT, the address where the hosts meet")
    address = host_and_port("--master", master) if master is not None and hosts > 1 else None
    return LaunchCluster(workers, hosts, host_index, address, timeout_s)


def refuse_other_options(ctx: typer.Context, option: str, *others: str) -> None:
    """Refuse options beside one that takes all others from a record."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params if name not in (option, *others)}
    extra = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if extra:
        refuse(f"--{option} takes all other options from the record of the run: leave out {', '.join(sorted(extra))}")


def existing_directory(directory: Path) -> Path:
    """Refuse a log directory that does not exist."""
    if not directory.is_dir():
        refuse(f"the log directory {directory} does not exist (looked in {Path.cwd()})")
    return directory.resolve()


def host_and_port(option: str, text: str, lowest: int = 1) -> tuple[str, int]:
    """Parse HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and lowest <= int(port) < 65536):
        refuse(f"{option} must be HOST:PORT such as node0:29500, got {text!r}")
    try:
        host.encode("idna")
    except UnicodeError as error:
        refuse(f"{option}: {host!r} is no name of a host: {error.__cause__ or error}")
    return host.strip("[]"), int(port)


def check_rule(text: str | None, elastic: bool = False, program: Program | None = None) -> bool:
    """Refuse an invalid rule here, once, instead of on every worker; `elastic`: whether workers may join later;
    `program`: beside which `module:name` is looked for.

    Returns whether the workers may open connections of their own: true for asynchronous rules, and without a rule.
    """
    if text is None:
        return True
    look_beside(program, text)
    problem, opens_connections = rule_check.checked(text, elastic)
    if problem:
        refuse(f"--rule: {problem}")
    return opens_connections


def look_beside(program: Program | None, rule: str) -> None:
    """Look for a rule `module:name` in the program's folder, too, as workers do; refuse the program itself."""
    source = None if program is None else program.source
    if source is not None and ":" in rule:
        sys.path.append(str(source.resolve().parent))
        if rule.strip().startswith(f"{source.stem}:"):
            refuse(f"--rule {rule} would import the program {source.name}, and train: put the rule into its own file")


def new_directory(inside: str) -> Path:
    """An unused name in `inside`, from the current time."""
    name = time.strftime("%Y%m%d-%H%M%S")
    directory, turn = Path(inside) / name, 1
    while directory.exists():
        turn += 1
        directory = Path(inside) / f"{name}-{turn}"
    return directory


def log_directory(asked: Path | None, cluster: LaunchCluster, overwrite: bool) -> Path:
    directory = new_directory(LOGS) if asked is None else asked
    if asked is not None:
        _clear(directory, cluster, overwrite)
    with refuse_unwritable(directory, "--log" if asked is not None else "the log directory"):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # fails now, if the directory is not writable
            pass
    return directory.resolve()


@contextlib.contextmanager
def refuse_unwritable(place: Path, what: str) -> Iterator[None]:
    """Turn a failed write into a refusal."""
    try:
        yield
    except OSError as error:
        refuse(f"{what} {place} is not writable ({error.strerror or error}); give another directory")


def check_crowd(workers: int, each: int = CROWDED_WORKERS) -> None:
    """Refuse more workers than `each` for a processor of this host."""
    cores = len(os.sched_getaffinity(0))
    if workers > each * cores:
        refuse(
            f"--workers {workers} is more than {each} for each of the {cores} processors here: take at most "
            f"{each * cores}, more hosts (--hosts a,b), or paceline sim, whose workers share one process"
        )


def free_port(cluster: LaunchCluster) -> None:
    """Refuse an unknown host name in `--master`, and on host 0 a port that is in use."""
    if cluster.master is None:
        return
    name, port = cluster.master
    try:
        result = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        refuse(f"--master {name}:{port}: this host does not know {name} ({error.strerror or error})")
    for family, _, _, _, where in result if cluster.host_index == 0 else ():
        try:
            socket.create_server((str(where[0]), port), family=family).close()
        except OSError as error:  # other errors: an address of a router in front of this host
            if error.errno == errno.EADDRINUSE:
                refuse(f"--master {name}:{port}: port {port} is in use here; choose a free one, the same on all hosts")
            if error.errno == errno.EACCES:
                refuse(f"--master {name}:{port}: this user may not listen at port {port}; choose one above 1023")


def _clear(directory: Path, cluster: LaunchCluster, overwrite: bool) -> None:
    """Refuse or remove the logs of an earlier run, those of this host's ranks."""
    if directory.exists() and not directory.is_dir():
        refuse(f"--log {directory} is a file; give a directory")
    old = [path for path in directory.glob("rank-*.jsonl") if _of_this_host(path, cluster)]
    if old and not overwrite:
        refuse(f"{directory} already holds a run ({old[0].name}): give another log directory, or add --overwrite")
    for path in old:
        path.unlink()
    if old:
        (directory / ATTACHED).unlink(missing_ok=True)


def _of_this_host(path: Path, cluster: LaunchCluster) -> bool:
    match = LOG_NAME.fullmatch(path.name)
    if not match:
        return False
    host = int(match[1]) // cluster.workers
    return host == cluster.host_index or (host >= cluster.hosts and cluster.host_index == 0)
