# SPDX-License-Identifier: Apache-2.0
"""One worker process of this host, and how it is signalled. Apart, because what watches the workers loads torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.launch import parent_death
from paceline.cli.run.output_files import output_files


@dataclass(frozen=True)
class WorkerProcess:
    """One process and the two files that take its output."""

    rank: int
    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path


@dataclass(frozen=True)
class Command:
    """What every worker runs."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    output: Path  # directory of the files that take the workers' output
    may_lose: Callable[[int], bool] = lambda rank: False  # whether the others go on without this one
    start: int = 0  # how often all were started before


def spawn(command: Command, rank: int, coordinates: Mapping[str, str]) -> WorkerProcess:
    """Start a worker, which is told by `coordinates` who it is."""
    restart = {"PACELINE_RESTART": str(command.start)}
    environment = {**os.environ, **command.environment, **restart, **coordinates}
    turn = f".{command.start + 1}" if command.start else ""
    stdout, stderr = (command.output / f"rank-{rank:03d}{turn}.{name}" for name in ("out", "err"))
    with output_files(stdout, stderr) as (out, err):
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *command.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    return WorkerProcess(rank, process, stdout, stderr)


def signal_session(worker: WorkerProcess, which: signal.Signals) -> None:
    """Signal the worker and all its descendants in its process group."""
    try:
        os.killpg(worker.process.pid, which)
    except (ProcessLookupError, PermissionError):
        return  # nobody of the group is left
