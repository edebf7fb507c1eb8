# SPDX-License-Identifier: Apache-2.0
"""`paceline doctor`: is this cluster fit for training?

Without a launcher's variables it starts the workers itself, each this command again; with them it is one worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paceline.errors import PacelineError

from . import checks
from .cluster import Cluster
from .console import err, error_panel, out, refuse
from .explain import parse_count

if TYPE_CHECKING:
    from paceline.doctor.measured import Measurements

UNFIT = 1
START_S, ROUND_S = 60.0, 20.0  # for torch to load; for one measurement at worst


def command(
    workers: Annotated[int, typer.Option(help="Number of workers; with several hosts, on each host.")] = 1,
    hosts: Annotated[int, typer.Option(help="Number of hosts; start this command on each.")] = 1,
    host_index: Annotated[int, typer.Option(help="Which of the hosts this is, from 0; ranks follow it.")] = 0,
    master: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where the hosts meet: host 0's address and a free port of it."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a worker that does not come.")] = 30.0,
    seconds: Annotated[float, typer.Option(help="Seconds of each transfer whose speed is measured.")] = 0.5,
    parameters: Annotated[
        str | None, typer.Option(help="Size of the model, such as 25.6M: what one exchange would take.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Directory for a page (doctor.html), its picture and the JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Check a cluster before it trains: connections, speed, clocks, versions, memory.

    Under torchrun or another launcher, start it as the training program: torchrun ... -m paceline doctor.
    Exit code 0: fit; 1: something is wrong; 2: the command makes no sense.
    """
    count = None if parameters is None else parse_count(parameters)
    if not 0.05 <= seconds <= 60:
        refuse(f"--seconds must lie in 0.05..60, got {seconds:g}")
    cluster = checks.cluster(workers, hosts, host_index, master, timeout)
    from paceline.doctor.probe import place_from  # here, because torch loads for seconds

    try:
        place = place_from(os.environ)
    except ValueError as error:
        refuse(f"{error}; start with torchrun, or without these variables: paceline doctor --workers N")
    if place is None:
        raise typer.Exit(_start(cluster, seconds, parameters, report, as_json))
    if workers != 1 or hosts != 1:
        refuse("a launcher has started this as one worker already: leave --workers and --hosts to it")
    from paceline.doctor.probe import Probe

    probe = Probe(place, timeout, seconds)
    try:
        found = probe.run()
        if found is None:
            raise typer.Exit(0 if probe.verdict() else UNFIT)
    except PacelineError as error:
        err().print(error_panel("the examination ended", Text(str(error), style="default")))
        raise typer.Exit(UNFIT) from None
    fit = _tell(found, count, report, as_json)
    with contextlib.suppress(RuntimeError):  # the store of a launcher that has ended
        probe.conclude(fit)
    raise typer.Exit(0 if fit else UNFIT)


def _tell(found: Measurements, parameters: int | None, report: Path | None, as_json: bool) -> bool:
    """Print, write the page, and return whether the cluster is fit."""
    from paceline.doctor import fit, judge, show

    findings = judge(found, parameters)
    if as_json:
        print(json.dumps(show.as_json(found, findings, parameters)), flush=True)
    else:
        show.print_all(out(), found, findings, parameters)
    if report is not None:
        try:
            page = show.write_report(report, found, findings, parameters)
        except (PacelineError, OSError) as error:
            err().print(error_panel("no report", Text(f"cannot write to {report}: {error}", style="default")))
        else:
            err().print(f"report: {page}", soft_wrap=True, markup=False)
    return fit(findings)


def _start(cluster: Cluster, seconds: float, parameters: str | None, report: Path | None, as_json: bool) -> int:
    """Start this host's workers and wait for them; rank 0's exit code, or the worst one of another host."""
    address, port = cluster.master or ("127.0.0.1", _free_port())
    arguments = ["--timeout", str(cluster.timeout_s), "--seconds", str(seconds)]
    arguments += [] if parameters is None else ["--parameters", parameters]
    arguments += [] if report is None else ["--report", str(report)]
    arguments += ["--json"] if as_json else []
    size = cluster.workers * cluster.hosts
    processes = []
    with tempfile.TemporaryFile() as errors:
        try:
            for local in range(cluster.workers):
                environment = {
                    **os.environ,
                    "RANK": str(cluster.host_index * cluster.workers + local),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(cluster.workers),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(port),
                    "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
                }
                shown = None if local == 0 else errors  # what the others print is needed only where it is all there is
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "paceline", "doctor", *arguments],
                        env=environment,
                        stdout=shown,
                        stderr=shown,
                        stdin=subprocess.DEVNULL,
                    )
                )
            return _wait(processes, START_S + 2 * cluster.timeout_s + size * (ROUND_S + seconds))
        finally:
            _end(processes)


def _wait(processes: list[subprocess.Popen[bytes]], deadline_s: float) -> int:
    until = time.monotonic() + deadline_s
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            says = f"the examination did not end within {deadline_s:g} s: this is an error of the doctor's own"
            err().print(error_panel("error", Text(says, style="default")))
            return UNFIT
    codes = [process.returncode for process in processes]
    return codes[0] if codes[0] >= 0 else 128 - codes[0]


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
