# SPDX-License-Identifier: Apache-2.0
"""Launches of many processes that cost no time: a parent that has imported everything forks them.

    python -m tests.processes.forked PHASES.json DIRECTORY

The parent starts no thread and no group. For each phase it forks N workers, in sessions of their own, waits for them
with a deadline, and writes how they ended to DIRECTORY/ended.json: [[[exit status, what it printed], ...], ...].
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.processes import counting

DEADLINE_S = 150.0


def worker(rank: int, workers: int, port: int, phase: dict[str, Any], directory: Path) -> None:
    """The life of a forked process."""
    os.setsid()
    out = os.open(directory / f"out.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(workers))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    code = 1
    try:
        path = directory / f"phase.{rank}.json"
        path.write_text(json.dumps(phase))
        counting.main(path)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launch(workers: int, phase: dict[str, Any], directory: Path) -> list[tuple[int, str]]:
    """Fork the workers of a phase; exit status (minus a signal's number) and output of each, in rank order."""
    port, processes = free_port(), {}
    for rank in range(workers):
        processes[rank] = os.fork()
        if processes[rank] == 0:
            worker(rank, workers, port, phase, directory)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(codes) < workers and time.monotonic() < deadline:
        for rank in processes.keys() - codes.keys():
            ended, status = os.waitpid(processes[rank], os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for rank, process in processes.items():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # and loader processes that a killed worker has left
        if rank not in codes:
            os.waitpid(process, 0)
    said = [(directory / f"out.{rank}").read_text() for rank in range(workers)]
    return [(codes.get(rank, -1000), said[rank]) for rank in range(workers)]


def main() -> None:
    """Carry out all phases, one after another."""
    directory = Path(sys.argv[2])
    phases = json.loads(Path(sys.argv[1]).read_text())
    ended = [launch(workers, phase, directory) for workers, phase in phases]
    (directory / "ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
