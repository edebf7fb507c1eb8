# SPDX-License-Identifier: Apache-2.0
"""The process of `paceline sim`: a script under N virtual workers, each with files for its output.

    python -m paceline.forecast.sim.program WORKERS HOSTS OUTPUT LINES SCRIPT [ARGUMENTS]

LINES is `as-is`, or `zero` or `random-data` for zero lines around the script (:mod:`paceline_plugins.zero.virtual`).

The command starts it as it starts a worker, and handles signals, crashes and the terminal. The first worker that fails
writes its traceback to OUTPUT/rank-R.err and its rank to OUTPUT/failed, where the command reads them. The other workers
end at their next exchange, or `GRACE_S` later.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.communication import virtual
from paceline.communication.diagnosis import own_traceback
from paceline.extensions import STARTERS, extension
from paceline.forecast.sim.output import WorkerStream
from paceline.forecast.sim.process_isolation import IsolatedProcess
from paceline.forecast.sim.simulate import WorkerContext, run_script

FAILED = "failed"
"""Name of the file with the rank of the worker that failed."""
GRACE_S = 5.0
"""For the other workers to end after a failure."""


class ProgramFailure:
    """The first worker that failed, if any.

    Args:
        output: directory of the files.
        script: the program, where a traceback begins.
    """

    def __init__(self, output: Path, script: Path) -> None:
        self.code = 0
        self._timer: threading.Timer | None = None
        self._output, self._script = output, script

    @contextlib.contextmanager
    def watching(self, transport: virtual.VirtualTransport) -> Iterator[None]:
        """The context of one worker's program."""
        rank = transport.world.rank
        try:
            try:
                yield
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise
            for ending in list(transport.cluster.endings[rank]):
                ending.close()
        except BaseException as error:
            if not self.code:
                self._report(rank, error)
            raise

    def _report(self, rank: int, error: BaseException) -> None:
        self.code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if not isinstance(error, SystemExit):
            print(own_traceback(self._script, type(error), error, error.__traceback__), end="", file=sys.stderr)
        elif isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        sys.stderr.flush()
        (self._output / FAILED).write_text(f"{rank}\n", encoding="utf-8")
        self._timer = threading.Timer(GRACE_S, os._exit, (self.code,))  # even if the other workers hang
        self._timer.daemon = True
        self._timer.start()

    def over(self) -> None:
        """All workers have ended."""
        if self._timer is not None:
            self._timer.cancel()


def host_names(workers: int, hosts: int) -> list[str] | None:
    """A host for each worker, in even blocks; None with one host."""
    return [f"host{rank * hosts // workers}" for rank in range(workers)] if hosts > 1 else None


def raise_file_limit(number: int) -> None:
    """Raise the limit of open files to `number`, as far as allowed."""
    with contextlib.suppress(ValueError, OSError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
        if soft != resource.RLIM_INFINITY and wanted > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _zero_lines(script: Path, lines: str) -> Iterator[WorkerContext]:
    """The context of a virtual worker's script: zero lines, or none where it attaches by itself."""
    if lines == "as-is":
        yield lambda transport: contextlib.nullcontext()
        return
    log = os.environ.get("PACELINE_LOG")
    IsolatedProcess.says_rank = False  # for this process
    virtual_zero_lines = extension(STARTERS, "virtual")
    with virtual_zero_lines(script, Path(log) if log else None, random_data=lines == "random-data") as zero_lines:
        yield zero_lines.worker


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code."""
    workers, hosts, output = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    lines, script, own = arguments[3], Path(arguments[4]), list(arguments[5:])
    raise_file_limit(256 + 3 * workers)
    sys.path.pop(0)  # the working directory, which `python -m` inserts
    failure = ProgramFailure(output, script)
    before = sys.stdout, sys.stderr
    streams = WorkerStream(sys.stdout, output, "out"), WorkerStream(sys.stderr, output, "err")
    sys.stdout, sys.stderr = streams
    try:
        with _zero_lines(script, lines) as zero_lines:

            @contextlib.contextmanager
            def around(transport: virtual.VirtualTransport) -> Iterator[None]:
                with failure.watching(transport), zero_lines(transport):
                    yield

            run_script(script, workers, own, around, host_names(workers, hosts))
    except BaseException:
        if not failure.code:
            raise
    finally:
        failure.over()
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.close_all()
    return failure.code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
