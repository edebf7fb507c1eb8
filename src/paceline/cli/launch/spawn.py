# SPDX-License-Identifier: Apache-2.0
"""One worker process of this host. A file of its own, so that it can be used before torch is loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.core import parent_death

END_S = 5.0
"""For a killed worker to end."""


@dataclass(frozen=True)
class WorkerProcess:
    """One process and the two files that take its output."""

    rank: int
    process: Any  # a `subprocess.Popen`, or a worker of a fork server, which has the same methods
    stdout: Path
    stderr: Path


@dataclass(frozen=True)
class Command:
    """The command of every worker."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    output: Path  # directory of the workers' output files
    of_rank: Callable[[int], Mapping[str, str]] = lambda rank: {}  # further variables of a rank
    may_lose: Callable[[int], bool] = lambda rank: False  # whether the run continues without this rank
    start: int = 0  # number of earlier starts
    forks: Any = None  # starts the workers; None: each is executed


def spawn(command: Command, rank: int, coordinates: Mapping[str, str]) -> WorkerProcess:
    """Start a worker; `coordinates` are its variables."""
    restart = {"PACELINE_RESTART": str(command.start)}
    environment = {**os.environ, **command.environment, **command.of_rank(rank), **restart, **coordinates}
    turn = f".{command.start + 1}" if command.start else ""
    stdout, stderr = (command.output / f"rank-{rank:03d}{turn}.{name}" for name in ("out", "err"))
    with output_files(stdout, stderr) as (out, err):
        if command.forks is not None:
            return WorkerProcess(rank, command.forks.start(command.arguments, environment, out, err), stdout, stderr)
        process = subprocess.Popen(
            [*parent_death.starter(), *command.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    return WorkerProcess(rank, process, stdout, stderr)


def signal_session(worker: WorkerProcess, which: signal.Signals) -> None:
    """Signal the worker and all its descendants in its process group."""
    if which == signal.SIGKILL and hasattr(worker.process, "call_off"):
        worker.process.call_off()  # if it has not been started
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(worker.process.pid, which)


def reap(worker: WorkerProcess) -> None:
    """Wait for the end of a killed worker, but not if it hangs in the kernel, at a disk that is gone."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(END_S)


logger = logging.getLogger(__name__)
_warned = False


@contextlib.contextmanager
def output_files(stdout: Path, stderr: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Both files, open for a new process."""
    with _opened(stdout) as out, _opened(stderr) as err:
        yield out, err


def _opened(path: Path) -> IO[bytes]:
    global _warned
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")
    except OSError as error:
        if not _warned:
            _warned = True
            logger.warning("the workers' output is lost from now on: %s", error)
        return open(os.devnull, "wb")
