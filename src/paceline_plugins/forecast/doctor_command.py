# SPDX-License-Identifier: Apache-2.0
"""`paceline doctor`: is this cluster ready for training?

Under a launcher it is one worker. Without one it is the first worker of this host, and starts the other workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paceline.cli.console import command_app, err, error_panel, out, parse_count, refuse
from paceline.cli.console.program_options import AsJson, Master
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import checks
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline_plugins.forecast.doctor.measured import Measurements
    from paceline_plugins.forecast.doctor.probe import ProbeCoordinates

UNFIT = 1
TIMEOUT, WAIT_S = "PACELINE_TIMEOUT_S", 30.0
"""The variable with the seconds that each worker is waited for, and their default."""
SECONDS = 0.5
"""Of each measured transfer."""
LEAVE_S = 5.0  # for a worker to exit after the verdict


def command(
    workers: Annotated[int, typer.Option(help="Number of workers; with several hosts, on each host.")] = 1,
    hosts: Annotated[int, typer.Option(help="Number of hosts; start this command on each.")] = 1,
    host_index: Annotated[int, typer.Option(help="Which of the hosts this is, from 0; ranks follow it.")] = 0,
    master: Master = None,
    parameters: Annotated[
        str | None, typer.Option(help="Size of the model, such as 25.6M, to estimate the time of an exchange.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a cluster before it trains: connections, speed, clocks, versions, memory.

    Under torchrun or another launcher, start it as the training program: torchrun ... -m paceline doctor.
    Exit code 0: ready; 1: a check failed; 2: invalid options.
    """
    count = None if parameters is None else parse_count(parameters)
    cluster = checks.cluster(workers, hosts, host_index, master, _timeout_s())
    from paceline_plugins.forecast.doctor.probe import (  # here, because torch loads for seconds
        ProbeCoordinates,
        coordinates_from,
    )

    try:
        place = coordinates_from(os.environ)
    except ValueError as error:
        refuse(f"{error}; start with torchrun, or without these variables: paceline doctor --workers N")
    if place is not None and (workers != 1 or hosts != 1):
        refuse("a launcher has started this as one worker: leave out --workers and --hosts")
    if place is None:
        address, port = cluster.master or ("127.0.0.1", _free_port())
        place = ProbeCoordinates(cluster.host_index * cluster.workers, cluster.workers * cluster.hosts, address, port)
    with _other_workers(cluster, place):
        code = _examine(place, cluster.timeout_s, count, as_json)
    raise typer.Exit(code)


def _timeout_s() -> float:
    """For which each worker is waited for."""
    try:
        return float(os.environ.get(TIMEOUT, WAIT_S))
    except ValueError:
        refuse(f"{TIMEOUT} must be a number of seconds, got {os.environ[TIMEOUT]!r}")


def _examine(
    place: ProbeCoordinates,
    timeout_s: float,
    parameters: int | None,
    as_json: bool,
) -> int:
    """Run one worker; the exit code."""
    from paceline_plugins.forecast.doctor.probe import Probe

    probe = Probe(place, timeout_s, SECONDS)
    try:
        found = probe.run()
        if found is None:
            return 0 if probe.verdict() else UNFIT
    except PacelineError as error:
        err().print(error_panel("the examination failed", Text(str(error), style="default")))
        return UNFIT
    fit = _report(found, parameters, as_json)
    with contextlib.suppress(RuntimeError):  # the store of a launcher that has ended
        probe.conclude(fit)
    return 0 if fit else UNFIT


def _report(found: Measurements, parameters: int | None, as_json: bool) -> bool:
    """Print the findings, and return whether the cluster is ready."""
    from paceline_plugins.forecast.doctor import show
    from paceline_plugins.forecast.doctor.judge import fit, judge

    findings = judge(found, parameters)
    if as_json:
        print(json.dumps(show.as_json(found, findings, parameters)), flush=True)
    else:
        show.print_all(out(), found, findings, parameters)
    return fit(findings)


@contextlib.contextmanager
def _other_workers(cluster: LaunchCluster, place: ProbeCoordinates) -> Iterator[None]:
    """Run this host's other workers, each as this command."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for local in range(1, cluster.workers):
            environment = {
                **os.environ,
                "RANK": str(place.rank + local),
                "WORLD_SIZE": str(place.size),
                "MASTER_ADDR": place.address,
                "MASTER_PORT": str(place.port),
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "paceline", "doctor"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # the first worker reports
                )
            )
        yield
    finally:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_S)
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


app = command_app(command)
