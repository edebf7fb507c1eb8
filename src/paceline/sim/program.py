# SPDX-License-Identifier: Apache-2.0
"""The process of `paceline sim`: a script under N virtual workers, each with files of its own for what it prints.

    python -m paceline.sim.program WORKERS HOSTS OUTPUT SCRIPT [ARGUMENTS]

The command starts it as it starts a worker, so signals, crashes and the terminal are dealt with there. The first worker
that fails leaves its traceback in OUTPUT/rank-R.err and its rank in OUTPUT/failed, from where the command tells it.
Then the others end at their next exchange, or `GRACE_S` later.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from paceline.sim.output import Output
from paceline.sim.simulate import run_script
from paceline.transport import virtual

FAILED = "failed"
"""Name of the file with the rank of the worker that failed."""
GRACE_S = 5.0
"""After the failure of a worker, for the others to come to their end."""


class Failure:
    """The first worker that failed, if any.

    Args:
        output: directory of the files.
        script: the program, with which a traceback begins.
    """

    def __init__(self, output: Path, script: Path) -> None:
        self.code = 0
        self._timer: threading.Timer | None = None
        self._output, self._script = output, str(script)

    @contextlib.contextmanager
    def watching(self, transport: virtual.VirtualTransport) -> Iterator[None]:
        """Around all that one worker does."""
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
                self._tell(rank, error)
            raise

    def _tell(self, rank: int, error: BaseException) -> None:
        self.code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if not isinstance(error, SystemExit):
            trace = _from_script(error.__traceback__, self._script)
            print("".join(traceback.format_exception(type(error), error, trace)), end="", file=sys.stderr)
        elif isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        sys.stderr.flush()
        (self._output / FAILED).write_text(f"{rank}\n", encoding="utf-8")
        self._timer = threading.Timer(GRACE_S, os._exit, (self.code,))  # whatever the others do, or wait for
        self._timer.daemon = True
        self._timer.start()

    def over(self) -> None:
        """All workers have come to their end."""
        if self._timer is not None:
            self._timer.cancel()


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """A traceback without the frames in which the simulation starts the script."""
    here = trace
    while here is not None and here.tb_frame.f_code.co_filename != script:
        here = here.tb_next
    return here or trace


def host_names(workers: int, hosts: int) -> list[str] | None:
    """A host for each worker, in blocks as even as can be; None where all are on this one."""
    return [f"host{rank * hosts // workers}" for rank in range(workers)] if hosts > 1 else None


def allow_files(number: int) -> None:
    """Let the process have so many files open, as far as it may."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
        if soft != resource.RLIM_INFINITY and wanted > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code."""
    workers, hosts, script = int(arguments[0]), int(arguments[1]), Path(arguments[3])
    output, own = Path(arguments[2]), list(arguments[4:])
    allow_files(256 + 3 * workers)
    sys.path.pop(0)  # the working directory, which Python puts there for -m; a script has its own folder instead
    failure = Failure(output, script)
    before = sys.stdout, sys.stderr
    streams = Output(sys.stdout, output, "out"), Output(sys.stderr, output, "err")
    sys.stdout, sys.stderr = streams
    try:
        run_script(script, workers, own, failure.watching, host_names(workers, hosts))
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
